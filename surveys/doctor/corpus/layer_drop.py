# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""LayerDrop: each worker skips other layers, so some gradients are missing on some workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LayerDropMLP(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.out = nn.Linear(width, 1)

    def forward(self, x, keep):
        x = self.inp(x)
        for layer, kept in zip(self.layers, keep, strict=True):
            if kept:
                x = x + torch.relu(layer(x))
        return self.out(x)


def make():
    torch.manual_seed(0)
    return LayerDropMLP()


def batch(step, rank):
    g = torch.Generator().manual_seed(7 + 3 * step + rank)
    x = torch.randn(8, 3, generator=g)
    keep = (torch.rand(4, generator=g) > 0.4).tolist()
    return x, x.square().sum(1, keepdim=True), keep


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(make(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        x, y, keep = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x, keep), y).backward()
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
