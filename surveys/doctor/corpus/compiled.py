# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""torch.compile around the wrapped model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 40)
        self.down = nn.Linear(40, 3)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def mlp():
    torch.manual_seed(0)
    return MLP()


def batch(step, rank):
    g = torch.Generator().manual_seed(6 * step + rank)
    x = torch.randn(16, 6, generator=g)
    return x, x[:, :3].argmin(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.compile(DDP(mlp()), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(5):
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
