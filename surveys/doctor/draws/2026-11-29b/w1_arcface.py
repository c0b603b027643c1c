"""Face recognition: the backbone is wrapped, the ArcFace head in the loss is not."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IDENTITIES, EMBEDDING = 12, 16


class Faces(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(31)
        self.x = torch.randn(n, 3, 8, 8, generator=g)
        self.y = torch.randint(0, IDENTITIES, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.PReLU()
        )
        self.fc = nn.Linear(72, EMBEDDING)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


class ArcFaceLoss(nn.Module):
    def __init__(self, num_classes, embedding_size, s=16.0, m=0.3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_classes, embedding_size) * 0.1)
        self.s, self.m = s, m

    def forward(self, embeddings, labels):
        cosine = F.linear(F.normalize(embeddings), F.normalize(self.weight)).clamp(
            -1 + 1e-6, 1 - 1e-6
        )
        phi = cosine * math.cos(self.m) - (1 - cosine**2).sqrt() * math.sin(self.m)
        one_hot = F.one_hot(labels, cosine.size(1)).bool()
        return F.cross_entropy(self.s * torch.where(one_hot, phi, cosine), labels)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    backbone = DistributedDataParallel(Backbone())
    margin = ArcFaceLoss(IDENTITIES, EMBEDDING)
    optimizer = torch.optim.SGD(
        [{"params": backbone.parameters(), "weight_decay": 5e-4}, {"params": margin.parameters()}],
        lr=0.05,
        momentum=0.9,
    )
    data = Faces()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = margin(backbone(images), labels)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
