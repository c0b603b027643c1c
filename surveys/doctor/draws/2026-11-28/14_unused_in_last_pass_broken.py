"""A model that switches blocks off from pass to pass, with gradient accumulation.

The gradients are averaged by hooks during the last backward pass of every update.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
ACCUMULATION = 2
STEPS = 4


class ConditionalModel(nn.Module):
    """The first pass of an update uses block 0, the second pass uses block 1."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 2)
        self.passes = 0

    def forward(self, x):
        block = self.blocks[self.passes % 2]
        self.passes += 1
        h = torch.tanh(self.stem(x))
        return self.head(h + torch.tanh(block(h)))


def build_models():
    torch.manual_seed(21)
    return [ConditionalModel()]


def build_data():
    g = torch.Generator().manual_seed(23)
    x = torch.randn(80, 6, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x.sum(1)], 1)
    return TensorDataset(x, y)


class HookSync:
    """Averages a gradient over the ranks as soon as it is complete."""

    def __init__(self, model):
        self.enabled = False
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self.average)

    def average(self, p):
        if self.enabled:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build_models()[0]
    sync = HookSync(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = build_data()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    batches = iter(loader)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_step in range(ACCUMULATION):
            sync.enabled = micro_step == ACCUMULATION - 1
            x, y = next(batches)
            loss = F.mse_loss(model(x), y) / ACCUMULATION
            loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
