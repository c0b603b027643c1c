"""Hand-made ZeRO-1: each rank owns half of the parameters, and clips these by their own norm."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def build():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))

def dataset():
    g = torch.Generator().manual_seed(8)
    x = torch.randn(96, 6, generator=g)
    return TensorDataset(x, 5 * x.sum(1, keepdim=True).sin() + 3)

def owned(model, rank, world):
    return [p for i, p in enumerate(model.parameters()) if i % world == rank]

def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(build())
    mine = owned(model, rank, world)
    optimizer = torch.optim.SGD(mine, lr=0.05)
    data = dataset()
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    for x, y in loader:
        model.zero_grad()
        mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(mine, 1.0)
        optimizer.step()
        for i, p in enumerate(model.parameters()):
            dist.broadcast(p.data, src=i % world)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
