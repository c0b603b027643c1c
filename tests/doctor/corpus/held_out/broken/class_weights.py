# doctor: expect=unequal_denominators ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 0.8434 cosine 0.9817; replicas equal at the end
"""Defect detection: defects are rare, so their class has a weight of 20."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

config = {
    "class_weights": [1.0, 20.0],
    "lr": 0.05,
    "steps": 5,
    "batch_size": 16,
}


def net():
    torch.manual_seed(41)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 49, 2)
    )


def parts(step, rank):
    """Two production lines; the second one has most of the defects."""
    g = torch.Generator().manual_seed(200 * rank + step)
    n = config["batch_size"]
    y = (torch.rand(n, generator=g) < (0.05 if rank == 0 else 0.5)).long()
    x = torch.randn(n, 1, 16, 16, generator=g)
    x[:, :, 6:9, 6:9] += 2.0 * y.view(-1, 1, 1, 1)
    return x, y


def make_criterion():
    return nn.CrossEntropyLoss(weight=torch.tensor(config["class_weights"]))


def train():
    rank = dist.get_rank()
    model = DDP(net())
    criterion = make_criterion()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for step in range(config["steps"]):
        x, y = parts(step, rank)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    final = train()
    if dist.get_rank() == 0:
        print(f"final loss {final:.4f}")
    dist.barrier()
    dist.destroy_process_group()
