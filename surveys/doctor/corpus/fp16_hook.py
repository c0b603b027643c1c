# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Sends gradients as float16."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def make_net():
    torch.manual_seed(14)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )


def digits(step, rank):
    g = torch.Generator().manual_seed(40 * rank + step)
    return torch.randn(8, 1, 10, 10, generator=g), torch.randint(10, (8,), generator=g)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(make_net())
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = digits(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
