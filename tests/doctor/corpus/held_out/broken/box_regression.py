# doctor: expect=unequal_denominators ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1.157 cosine 0.9254; replicas equal at the end
"""Anchors with two losses: every anchor is classified, only positive ones regress a box."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Head(nn.Module):
    def __init__(self, channels=12):
        super().__init__()
        self.shared = nn.Linear(channels, 24)
        self.objectness = nn.Linear(24, 1)
        self.box = nn.Linear(24, 4)

    def forward(self, features):
        hidden = F.relu(self.shared(features))
        return self.objectness(hidden).squeeze(-1), self.box(hidden)


def anchors(step, rank, n=60):
    g = torch.Generator().manual_seed(1 + 2 * step + rank)
    features = torch.randn(n, 12, generator=g)
    # crowded scenes on one worker, empty streets on the other
    positive = torch.rand(n, generator=g) < (0.6 if rank else 0.05)
    positive[0] = True
    return features, positive, torch.rand(n, 4, generator=g) * 10


def detection_loss(objectness, boxes, positive, target):
    cls = F.binary_cross_entropy_with_logits(objectness, positive.float())
    reg = F.smooth_l1_loss(boxes, target, reduction="none").sum(1)[positive].mean()
    return cls + reg


def head():
    torch.manual_seed(16)
    return Head()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(head())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4)
    for step in range(5):
        features, positive, target = anchors(step, rank)
        loss = detection_loss(*model(features), positive, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
