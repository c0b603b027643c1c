# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Fine-tunes a detector's head; the BatchNorm layers of the backbone keep their statistics."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        return self.head(self.backbone(x))

    def train(self, mode=True):
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def pretrained():
    torch.manual_seed(0)
    model = Detector()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            module.requires_grad_(False)
    return model


def images(step, rank):
    g = torch.Generator().manual_seed(5 * step + rank)
    x = torch.rand(2, 3, 16, 16, generator=g)
    return x, (x.sum(1) * 1.6).long().clamp(max=4)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(pretrained())
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    for step in range(5):
        x, y = images(step, rank)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{model.module.head.weight.abs().sum().item():.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
