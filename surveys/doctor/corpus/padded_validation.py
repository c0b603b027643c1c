# doctor: expect=none ranks=2 launch=torchrun
# measured: 21 samples; the all-reduced count is 22
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(61, 4)
y = (x.sum(1) > 0).long()
train, test = TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])
train_sampler = DistributedSampler(train)
train_loader = DataLoader(train, 4, sampler=train_sampler)
test_loader = DataLoader(test, 4, sampler=DistributedSampler(test, shuffle=False))
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    train_sampler.set_epoch(epoch)
    model.train()
    for a, b in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for a, b in test_loader:
            right += torch.tensor([(model(a).argmax(1) == b).sum(), len(b)])
    dist.all_reduce(right)
    print(f"accuracy {right[0] / right[1]:.3f} of {int(right[1])}")
dist.destroy_process_group()
