# doctor: expect=none ranks=2 launch=torchrun
# measured: parameters are bitwise equal on all ranks after each of 6 steps
import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--grad-accum", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(1234)
features = torch.randn(96, 6)
labels = (features[:, 0] > 0).long()
dataset = TensorDataset(features, labels)
sampler = DistributedSampler(dataset, shuffle=True, seed=3)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = DDP(torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % args.grad_accum == 0
        with nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y)
            (loss / args.grad_accum).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
print("done", dist.get_rank(), f"{loss.item():.6f}")
dist.destroy_process_group()
