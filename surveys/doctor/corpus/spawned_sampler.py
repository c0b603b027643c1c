# doctor: expect=none ranks=2 launch=python
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Starts its own two processes: python spawned.py"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sines(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        t = torch.linspace(0, 6.28, 20)
        frequency = 1 + i % 3
        return torch.sin(frequency * t + i).unsqueeze(0), i % 3


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv1d(1, 8, 5)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.features(x)).amax(2))


def conv():
    torch.manual_seed(0)
    return Conv()


def worker(rank, world_size, rendezvous):
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size)
    data = Sines()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(conv())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(2, os.path.join(folder, "rendezvous")), nprocs=2)


if __name__ == "__main__":
    main()
