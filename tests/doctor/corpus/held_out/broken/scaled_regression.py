# doctor: expect=scaled_by_world_size ranks=4 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 4 cosine 1; replicas equal at the end
"""House prices, four workers."""

import argparse

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_dataset():
    g = torch.Generator().manual_seed(11)
    x = torch.randn(96, 6, generator=g)
    y = (x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0], [3.0], [1.0]])).sin()
    return TensorDataset(x, y)


def build_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def run_epoch(model, loader, optimizer, world_size):
    loss_fn = nn.MSELoss()
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        # DDP divides by the number of processes
        (loss * world_size).backward()
        optimizer.step()


def main(args):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    dataset = build_dataset()
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    model = DDP(build_model())
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        run_epoch(model, loader, optimizer, world_size)
    if dist.get_rank() == 0:
        print("weight sum", round(sum(p.sum().item() for p in model.parameters()), 4))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
