# doctor: expect=static_graph_with_no_sync ranks=2 launch=torchrun
# measured: the run fails, exit code not 0
"""Accumulates two micro-batches; the graph never changes, so DDP may rely on that."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 3)

    def forward(self, x):
        return self.b(self.a(x).relu())


def data(index, rank):
    g = torch.Generator().manual_seed(2 * index + rank)
    x = torch.randn(8, 8, generator=g)
    return x, x[:, :3].argmax(1)


def main(accumulate=2, updates=4):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Model(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for update in range(updates):
        optimizer.zero_grad()
        for k in range(accumulate):
            x, y = data(update * accumulate + k, rank)
            last = k == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y) / accumulate
                loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
