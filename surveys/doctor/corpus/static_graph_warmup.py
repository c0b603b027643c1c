# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 1 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Accumulates two micro-batches after a warm-up without accumulation."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def data(index, rank):
    g = torch.Generator().manual_seed(2 * index + rank)
    x = torch.randn(8, 8, generator=g)
    return x, x[:, :3].argmax(1)


def main(warmup=1, accumulate=2, updates=4):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(mlp(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    index = 0
    for update in range(updates):
        window = 1 if update < warmup else accumulate
        optimizer.zero_grad()
        for k in range(window):
            x, y = data(index, rank)
            index += 1
            with contextlib.nullcontext() if k == window - 1 else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y) / window
                loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
