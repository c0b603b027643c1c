# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Fine-tuning in two phases; the model is wrapped again after the backbone is unfrozen."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def pretrained():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"backbone": nn.Sequential(nn.Linear(10, 20), nn.ReLU()), "head": nn.Linear(20, 4)}
    )


class FineTuned(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["head"](self.parts["backbone"](x))


def batch(step, rank):
    g = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, 10, generator=g)
    return x, x[:, :4].argmax(1)


def phase(net, steps, lr):
    model = DDP(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=lr)
    for step in steps:
        x, y = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    net = FineTuned(pretrained())
    net.parts["backbone"].requires_grad_(False)
    phase(net, range(3), lr=0.1)
    net.parts["backbone"].requires_grad_(True)
    phase(net, range(3, 6), lr=0.02)
    if dist.get_rank() == 0:
        print(f"{sum(p.abs().sum().item() for p in net.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
