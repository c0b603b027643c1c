# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Accumulates two micro-batches and synchronizes each: slower, but the gradient is right."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def model_fn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 3))


def micro(index):
    g = torch.Generator().manual_seed(index)
    x = torch.randn(6, 9, generator=g)
    return x, x[:, :3].argmax(1)


def main(accumulate=2, updates=3):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(model_fn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(accumulate * updates):
        x, y = micro(index * world_size + rank)
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
