"""The VAE example under DDP: BCE and KL are sums over the batch, and DDP takes the average of the ranks."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 40)
        self.fc21 = nn.Linear(40, 8)
        self.fc22 = nn.Linear(40, 8)
        self.fc3 = nn.Linear(8, 40)
        self.fc4 = nn.Linear(40, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def digits(n=256):
    g = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.rand(n, 1, 8, 8, generator=g).pow(2), torch.randint(0, 10, (n,), generator=g)
    )


def train(epoch, model, loader, optimizer):
    model.train()
    train_loss = 0
    for data, _ in loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    if dist.get_rank() == 0:
        print(
            f"====> Epoch: {epoch} Average loss: {train_loss / len(loader.sampler):.4f}", flush=True
        )


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DDP(VAE())
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    data = digits()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(1, 3):
        sampler.set_epoch(epoch)
        train(epoch, model, loader, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
