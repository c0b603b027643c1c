# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Triplets: three forwards through the wrapper, one backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def embedder():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 6))


def triplets(step, rank, n=8):
    g = torch.Generator().manual_seed(2 * step + rank)
    anchor = torch.randn(n, 8, generator=g)
    positive = anchor + 0.2 * torch.randn(n, 8, generator=g)
    negative = torch.randn(n, 8, generator=g)
    return anchor, positive, negative


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(embedder())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.TripletMarginLoss(margin=1.0)
    for step in range(5):
        anchor, positive, negative = triplets(step, rank)
        loss = criterion(model(anchor), model(positive), model(negative))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
