# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Workers with different amounts of data, under Join."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def model_fn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def shard(rank):
    """Rank 1 has two batches more."""
    g = torch.Generator().manual_seed(rank)
    for _ in range(4 + 2 * rank):
        x = torch.randn(8, 4, generator=g)
        yield x, x.sin().sum(1, keepdim=True)


def train(rank):
    """Returns the number of batches of this worker."""
    model = DDP(model_fn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = 0
    with Join([model], divide_by_initial_world_size=False):
        for x, y in shard(rank):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            batches += 1
    return batches


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor(train(rank))
    dist.all_reduce(total)
    if rank == 0:
        print(f"{total.item()} batches in all")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
