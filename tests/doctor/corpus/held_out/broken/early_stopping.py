# doctor: expect=hang_missing_rank ranks=2 launch=torchrun
# measured: replicas equal at the end; the run fails, exit code not 0
# also: mismatched_collectives,uneven_batches,rank_skipped_step
"""Stops when the validation loss no longer improves; each worker looks at its own part."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class EarlyStopping:
    def __init__(self, patience=1):
        self.best = float("inf")
        self.bad = 0
        self.patience = patience

    def __call__(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        return self.bad >= self.patience


def toy(seed, rank, n=8):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    return x, x.sum(1, keepdim=True) * (1 if rank == 0 else -1)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    stop = EarlyStopping()
    for epoch in range(8):
        x, y = toy(epoch, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            vx, vy = toy(500, rank, n=32)
            value = nn.functional.mse_loss(model.module(vx), vy).item()
        if stop(value):
            break
    if rank == 0:
        print("stopped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
