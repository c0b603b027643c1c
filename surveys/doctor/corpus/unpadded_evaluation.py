# doctor: expect=none ranks=4 launch=torchrun
# measured: images counted in the accuracy 42, right is 42; replicas equal at the end
"""Evaluates on 42 images with 4 workers and counts each image once."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def split(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    w = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x @ w + 2 * torch.randn(n, 4, generator=g)).argmax(1))


@torch.no_grad()
def evaluate(model, dataset):
    """Strided shards of unequal length: no collective inside the loop, so nobody waits."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = Subset(dataset, range(rank, len(dataset), world_size))
    model.eval()
    hits = torch.zeros(2)
    for x, y in DataLoader(shard, batch_size=4):
        hits[0] += (model(x).argmax(1) == y).sum()
        hits[1] += len(y)
    model.train()
    dist.all_reduce(hits)
    return hits.tolist()


def main():
    dist.init_process_group("gloo")
    train, test = split(128, 1), split(42, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    net = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        hits, count = evaluate(net.module, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {hits / count:.4f} on {count:.0f} images")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
