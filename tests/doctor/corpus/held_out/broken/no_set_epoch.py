# doctor: expect=epoch_order_repeats ranks=2 launch=torchrun
# measured: gradient of step 3 against one process with the full batch: every rank ratio 0.8277 cosine 0.9431; replicas equal at the end
# also: logged_value_is_local
"""Small ConvNet on synthetic images, three epochs."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.fc(x.mean(dim=(2, 3)))


def make_dataset():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(5, (48,), generator=g)
    x = torch.randn(48, 3, 10, 10, generator=g) + 0.2 * y.view(-1, 1, 1, 1)
    return TensorDataset(x, y)


def train(args, model, loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0 and dist.get_rank() == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(loader)}]\tLoss: {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(description="ConvNet")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    torch.manual_seed(1)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        train(args, model, loader, optimizer, epoch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
