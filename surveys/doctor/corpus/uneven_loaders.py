# doctor: expect=hang_missing_rank ranks=2 launch=torchrun
# measured: rank 0 has 7 batches, rank 1 has 4; rank 0's fifth backward finds no partner
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo", timeout=timedelta(seconds=6))
rank = dist.get_rank()
x = torch.randn(28 if rank == 0 else 16, 5, generator=torch.Generator().manual_seed(rank))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
torch.manual_seed(0)
model = DDP(nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, targets in loader:
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("rank", rank, "is done")
if rank == 1:
    import time

    time.sleep(7)
dist.destroy_process_group()
