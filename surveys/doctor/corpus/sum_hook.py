# doctor: expect=none ranks=4 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""The communication hook adds gradients up; the loss is divided by the global count."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def sum_hook(group, bucket):
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


def ranker():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 1))


def clicks(step, rank):
    """Each worker sees another number of impressions."""
    g = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(3 + 4 * rank, 7, generator=g)
    return x, (x[:, :1] > 0.3).float()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(ranker())
    model.register_comm_hook(dist.group.WORLD, sum_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    criterion = nn.BCEWithLogitsLoss(reduction="sum")
    for step in range(5):
        x, y = clicks(step, rank)
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        loss = criterion(model(x), y) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f} of {count.item():.0f} impressions")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
