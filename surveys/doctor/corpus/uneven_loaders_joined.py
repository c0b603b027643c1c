# doctor: expect=none ranks=2 launch=torchrun
# measured: Join shadows the collectives of the rank that is done; replicas are equal
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo", timeout=timedelta(seconds=6))
rank = dist.get_rank()
x = torch.randn(28 if rank == 0 else 16, 5, generator=torch.Generator().manual_seed(rank))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
torch.manual_seed(0)
model = DDP(nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Join([model]):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("rank", rank, "is done")
dist.destroy_process_group()
