# doctor: expect=mismatched_collectives ranks=2 launch=torchrun
# measured: replicas equal at the end; the run fails, exit code not 0
# also: hang_missing_rank,local_batch_norm
"""CNN with BatchNorm; rank 0 validates after each epoch."""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )


def batch(seed, n=16):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 8, 8, generator=g), torch.randint(3, (n,), generator=g)


@torch.no_grad()
def validate(model):
    x, y = batch(999)
    loss = nn.functional.cross_entropy(model(x), y)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        model.train()
        for i in range(3):
            x, y = batch(100 * epoch + 10 * i + rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            model.eval()
            print(f"epoch {epoch}: validation loss {validate(model):.4f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
