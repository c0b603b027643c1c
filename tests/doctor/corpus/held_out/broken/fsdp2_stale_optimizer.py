# doctor: expect=optimizer_on_other_parameters ranks=2 launch=torchrun
# measured: loss after four steps 10.78, right is 1.157; replicas equal at the end
"""Shards an MLP with FSDP2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class MLP(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(x)


def get_batch(step, rank):
    g = torch.Generator().manual_seed(2 * step + rank)
    x = torch.randn(16, 8, generator=g)
    return x, x.norm(dim=1, keepdim=True)


def setup(learning_rate):
    torch.manual_seed(30)
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer


def main():
    dist.init_process_group("gloo")
    model, optimizer = setup(learning_rate=1e-2)
    rank = dist.get_rank()
    for step in range(5):
        # the same batch every time: the loss should fall quickly
        x, y = get_batch(0, rank)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / dist.get_world_size():.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
