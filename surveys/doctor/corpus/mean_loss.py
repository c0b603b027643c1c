# doctor: expect=none ranks=2 launch=torchrun
# measured: parameters are bitwise equal on all ranks after each of 8 steps
"""A denoising autoencoder whose loss is a sum, moved from one GPU to DDP."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AutoEncoder(nn.Module):
    def __init__(self, dim=12, hidden=5):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.decoder(torch.relu(self.encoder(x)))


class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        clean = torch.rand(64, 12)
        self.rank = dist.get_rank()
        self.sampler = DistributedSampler(TensorDataset(clean), seed=1)
        self.loader = DataLoader(TensorDataset(clean), batch_size=8, sampler=self.sampler)
        self.model = DDP(AutoEncoder())
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for (x,) in self.loader:
                loss = self.criterion(self.model(x), x)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            print(f"[{self.rank}] epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    trainer = Trainer()
    trainer.fit(2)
    dist.destroy_process_group()
