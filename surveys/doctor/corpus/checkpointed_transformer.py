# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Activation checkpointing with a static graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Encoder(nn.Module):
    def __init__(self, width=16, layers=3):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 8, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = x + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x.mean(1))


def build():
    torch.manual_seed(0)
    return Encoder()


def sequences(step, rank):
    g = torch.Generator().manual_seed(step * 2 + rank)
    x = torch.randn(4, 8, 16, generator=g)
    return x, (x.mean((1, 2)) > 0).long()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(build(), static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        x, y = sequences(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
