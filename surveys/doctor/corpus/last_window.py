# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 2 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Ten batches per epoch in windows of four; the last window is divided by its own length."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits():
    g = torch.Generator().manual_seed(2)
    prototypes = torch.randn(10, 64, generator=g)
    labels = torch.arange(160) % 10
    return TensorDataset(prototypes[labels] + torch.randn(160, 64, generator=g), labels)


def make_net():
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def main():
    dist.init_process_group("gloo")
    dataset = digits()
    sampler = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for window in windows(loader, 4):
            for i, (x, y) in enumerate(window, start=1):
                context = contextlib.nullcontext() if i == len(window) else model.no_sync()
                with context:
                    (criterion(model(x), y) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("norm of the head", f"{model.module[2].weight.norm().item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
