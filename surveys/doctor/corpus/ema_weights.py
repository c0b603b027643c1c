# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Keeps an exponential moving average of the weights and evaluates with it."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class EMA:
    def __init__(self, model, decay=0.9):
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for average, value in zip(self.shadow.parameters(), model.parameters(), strict=True):
            average.lerp_(value, 1 - self.decay)


def regressor():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1))


def sample(step, rank, n=10):
    g = torch.Generator().manual_seed(31 * step + rank)
    x = torch.randn(n, 5, generator=g)
    return x, x.prod(1, keepdim=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(regressor())
    ema = EMA(model.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        x, y = sample(step, rank)
        loss = nn.functional.huber_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model.module)
    with torch.no_grad():
        x, y = sample(1000, rank, n=50)
        error = nn.functional.mse_loss(ema.shadow(x), y)
    dist.all_reduce(error)
    if rank == 0:
        print(f"test error of the average {error.item() / dist.get_world_size():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
