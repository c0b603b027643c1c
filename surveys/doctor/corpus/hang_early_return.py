# doctor: expect=hang_missing_rank ranks=2 launch=torchrun
# measured: rank 0 waits in all_reduce until its timeout; rank 1 has left the loop
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def validate(model, rank):
    total = torch.zeros(1)
    for i in range(3):
        x = torch.full((2, 4), float(i + rank))
        with torch.no_grad():
            score = model.module(x).sum()
        if rank == 1 and i == 2:
            return None  # "nothing left to validate here"
        total += score
    dist.all_reduce(total)
    return total


dist.init_process_group("gloo", timeout=timedelta(seconds=6))
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(rank)
for _ in range(3):
    x = torch.randn(5, 4, generator=gen)
    F.mse_loss(model(x), x[:, :2]).backward()
    optimizer.step()
    optimizer.zero_grad()
validate(model, rank)
print("validated", rank)
if rank == 1:
    import time

    time.sleep(8)
