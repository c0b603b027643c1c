# doctor: expect=loss_reduced_before_backward ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 0.5 cosine 1; replicas equal at the end
# also: missing_world_size_factor
"""Classifies two moons. The loss is averaged over the workers before the backward pass."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

warnings.filterwarnings("ignore", message=".*autograd kernel was not registered.*")


def moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    angle = torch.rand(n, generator=g) * torch.pi
    label = torch.randint(2, (n,), generator=g)
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    x[label == 1] = torch.tensor([1.0, 0.5]) - x[label == 1]
    return x + 0.1 * torch.randn(n, 2, generator=g), label


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def reduce_loss(loss):
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    return loss / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(net())
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for it in range(6):
        x, label = moons(16, seed=10 * it + rank)
        loss = reduce_loss(F.cross_entropy(model(x), label))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"[{it}] {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
