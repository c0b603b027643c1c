# doctor: expect=padded_evaluation ranks=4 launch=torchrun
# measured: images counted in the accuracy 44, right is 42; replicas equal at the end
"""Trains a classifier and reports its accuracy on 42 test images."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def split(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    w = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x @ w + 2 * torch.randn(n, 4, generator=g)).argmax(1))


def loaders(batch_size=8):
    train, test = split(128, 1), split(42, 2)
    train_sampler = DistributedSampler(train)
    test_sampler = DistributedSampler(test, shuffle=False)
    return (
        DataLoader(train, batch_size, sampler=train_sampler),
        DataLoader(test, batch_size, sampler=test_sampler),
    )


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = torch.zeros(2)
    for x, y in loader:
        hits[0] += (model(x).argmax(1) == y).sum()
        hits[1] += len(y)
    dist.all_reduce(hits)
    model.train()
    return hits


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DDP(nn.Linear(16, 4))
    train_loader, test_loader = loaders()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        train_loader.sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        hits, count = evaluate(net, test_loader).tolist()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {hits / count:.4f} on {count:.0f} images")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
