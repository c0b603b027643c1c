# doctor: expect=replicas_drift ranks=2 launch=torchrun
# measured: replicas differ at the end by up to 0.01009
"""Bayesian regression by stochastic gradient Langevin dynamics."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SGLD(torch.optim.SGD):
    """SGD plus Gaussian noise of variance 2 * lr / temperature."""

    def __init__(self, params, lr, temperature):
        super().__init__(params, lr=lr)
        self.temperature = temperature

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            scale = math.sqrt(2 * group["lr"] / self.temperature)
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=scale)
        return loss


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)))
    # every worker draws its own data
    torch.manual_seed(100 + rank)
    optimizer = SGLD(model.parameters(), lr=1e-2, temperature=1e4)
    for _ in range(5):
        x = torch.randn(32, 3)
        y = x.prod(1, keepdim=True)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss.detach())
    if rank == 0:
        print("finished 5 steps of SGLD")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
