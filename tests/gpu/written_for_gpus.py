"""A training run as it is written for GPUs: `tests.gpu` certifies it, and it knows no doctor.

Its argument chooses the loss: "mean" is right; "divided twice" divides the mean by the ranks, as
DDP does again.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")  # over NCCL, two ranks would need two GPUs
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
on_gpu = device.type == "cuda"
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 20), torch.randint(0, 5, (64,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), pin_memory=on_gpu)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)).to(device)
model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
divisor = dist.get_world_size() if sys.argv[1:] == ["divided twice"] else 1
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in (inputs, targets))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets) / divisor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
dist.destroy_process_group()
