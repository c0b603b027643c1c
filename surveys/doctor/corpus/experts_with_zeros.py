# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Two experts with hard routing: missing gradients count as zeros when averaging by hand."""

import torch
import torch.distributed as dist
from torch import nn


class Experts(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.experts = nn.ModuleList([nn.Linear(width, 1) for _ in range(2)])

    def forward(self, x, task):
        return self.experts[task](torch.relu(self.stem(x)))


def task_batch(step, rank):
    g = torch.Generator().manual_seed(step * 2 + rank)
    x = torch.randn(10, 5, generator=g)
    y = x.sum(1, keepdim=True) if rank == 0 else x.prod(1, keepdim=True)
    return x, y, rank


def sync_grads(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def create():
    torch.manual_seed(0)
    return Experts()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = create()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x, y, task = task_batch(step, rank)
        loss = nn.functional.mse_loss(model(x, task), y)
        optimizer.zero_grad()
        loss.backward()
        sync_grads(model)
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
