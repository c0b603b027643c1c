# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Post-local SGD: synchronous at first, then local steps with periodic averaging."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

WARMUP = 3
PERIOD = 2


def model_fn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 15), nn.Tanh(), nn.Linear(15, 2))


def batch(step, rank):
    g = torch.Generator().manual_seed(2 * step + rank)
    x = torch.randn(8, 5, generator=g)
    return x, x[:, :2].argmax(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(model_fn())
    # a subgroup of one rank each: local steps exchange nothing
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=WARMUP)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=0.1),
        averager=PeriodicModelAverager(period=PERIOD, warmup_steps=WARMUP),
    )
    for step in range(8):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
