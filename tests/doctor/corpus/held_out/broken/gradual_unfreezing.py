# doctor: expect=model_changed_after_wrapping ranks=2 launch=torchrun
# measured: replicas differ at the end by up to 0.02018
# also: replicas_drift
"""Fine-tuning: the head first, the backbone from the second epoch on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU())

    def forward(self, x):
        return self.layers(x)


class FineTuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad = flag


def batch(step, rank):
    g = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, 10, generator=g)
    return x, x[:, :4].argmax(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = FineTuned()
    set_trainable(net.backbone, False)
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = 0
    for epoch in range(2):
        if epoch == 1:
            set_trainable(net.backbone, True)
        for _ in range(3):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
    if rank == 0:
        print(f"head {net.head.weight.norm().item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
