# doctor: expect=partial_window_divided_by_k ranks=2 launch=torchrun
# measured: gradient of step 2 against one process with the full batch: every rank ratio 0.5 cosine 1; replicas equal at the end
"""Digits classifier; ten batches per epoch, windows of four."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4


def digits():
    g = torch.Generator().manual_seed(2)
    prototypes = torch.randn(10, 64, generator=g)
    labels = torch.arange(160) % 10
    return TensorDataset(prototypes[labels] + torch.randn(160, 64, generator=g), labels)


def make_net():
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def train_one_epoch(model, loader, optimizer, criterion):
    last = len(loader) - 1
    for i, (x, y) in enumerate(loader):
        update = (i + 1) % ACCUMULATE == 0 or i == last
        model.require_backward_grad_sync = update
        loss = criterion(model(x), y) / ACCUMULATE
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    dataset = digits()
    sampler = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, nn.CrossEntropyLoss())
    if dist.get_rank() == 0:
        print("norm of the head", f"{model.module[2].weight.norm().item():.4f}")
    dist.barrier()
    dist.destroy_process_group()
