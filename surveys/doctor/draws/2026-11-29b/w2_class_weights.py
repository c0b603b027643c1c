"""Imbalanced classes: CrossEntropyLoss(weight=...) divides by the weights of each rank's own labels."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NUM_CLASSES = 4


class Scans(Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(8)
        share = torch.tensor([0.7, 0.15, 0.1, 0.05])
        self.label = torch.multinomial(share, n, replacement=True, generator=g)
        self.x = torch.randn(n, 1, 10, 10, generator=g) + self.label.view(-1, 1, 1, 1) * 0.3

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.x[i], self.label[i]

    def class_weights(self):
        counts = torch.bincount(self.label, minlength=NUM_CLASSES).float()
        return counts.sum() / (NUM_CLASSES * counts)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()
        )
        self.classifier = nn.Linear(32, NUM_CLASSES)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = Scans()
    model = DDP(Net())
    criterion = nn.CrossEntropyLoss(weight=data.class_weights())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=30)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        running = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            running += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {running / len(loader):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
