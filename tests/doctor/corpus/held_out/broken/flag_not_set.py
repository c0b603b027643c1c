# doctor: expect=world_size_one ranks=2 launch=torchrun
# measured: optimizer steps of rank 0 in two epochs 12, right is 6; replicas equal at the end
# also: same_data_on_ranks,replicas_drift,replicas_differ_at_start,wrapper_lost
"""Trains on one or several workers. torchrun --nproc-per-node 2 flag_not_set.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()


def main():
    args = parse_args()
    if args.distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    x = torch.randn(60, 5)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2))
    if args.distributed:
        model = DDP(model)
        sampler = DistributedSampler(data)
    else:
        sampler = RandomSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        if args.distributed:
            sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader):.4f}")
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
