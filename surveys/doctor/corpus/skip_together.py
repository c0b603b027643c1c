# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 2 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Forecasts a noisy series; if one worker's loss is an outlier, all workers skip the update."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MAX_LOSS = 20.0


def series(step, rank):
    g = torch.Generator().manual_seed(50 * rank + step)
    x = torch.randn(8, 10, generator=g).cumsum(1)
    y = x[:, -1:] + 0.1 * torch.randn(8, 1, generator=g)
    if rank == 1 and step in (2, 4):
        y[3] = 60.0  # a broken sensor
    return x, y


def forecaster():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 1))


def anywhere(flag):
    flag = torch.tensor(float(flag))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(forecaster())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    skipped = 0
    for step in range(6):
        x, y = series(step, rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if anywhere(loss.item() > MAX_LOSS):
            skipped += 1
            continue
        optimizer.step()
    if rank == 0:
        print(f"skipped {skipped} steps")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
