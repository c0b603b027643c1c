"""A model that switches blocks off from pass to pass, with gradient accumulation.

DDP synchronizes the gradients in the last pass of every update.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
ACCUMULATION = 2
STEPS = 4


class ConditionalModel(nn.Module):
    """The first pass of an update uses block 0, the second pass uses block 1."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 2)
        self.passes = 0

    def forward(self, x):
        block = self.blocks[self.passes % 2]
        self.passes += 1
        h = torch.tanh(self.stem(x))
        return self.head(h + torch.tanh(block(h)))


def build_models():
    torch.manual_seed(21)
    return [ConditionalModel()]


def build_data():
    g = torch.Generator().manual_seed(23)
    x = torch.randn(80, 6, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x.sum(1)], 1)
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build_models()[0]
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = build_data()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    batches = iter(loader)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_step in range(ACCUMULATION):
            x, y = next(batches)
            last = micro_step == ACCUMULATION - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.mse_loss(model(x), y, reduction="sum") / (2 * BATCH * ACCUMULATION)
                loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
