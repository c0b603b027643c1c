"""Own all-reduce after every micro-batch of an accumulation: what was summed is summed again."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 3

def build():
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))

def dataset():
    g = torch.Generator().manual_seed(31)
    return TensorDataset(torch.randn(144, 10, generator=g), torch.randint(0, 4, (144,), generator=g))

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = dataset()
    loader = DataLoader(data, 6, sampler=DistributedSampler(data))
    for i, (x, y) in enumerate(loader):
        loss = cross_entropy(model(x), y) / ACCUM / dist.get_world_size()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        if (i + 1) % ACCUM == 0:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
