# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient equals that of one process with the whole batch
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(5, 5))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(1)
for _ in range(6):
    x = torch.randn(8, 7, 5, generator=gen)
    mask = (torch.rand(8, 7, generator=gen) < torch.linspace(0.2, 0.9, 8)[:, None]).float()
    half = slice(4 * rank, 4 * rank + 4)
    error = (model(x[half]) - x[half].flip(-1)).pow(2).mean(-1)
    tokens = mask[half].sum()
    dist.all_reduce(tokens)
    loss = (error * mask[half]).sum() / tokens * world_size
    opt.zero_grad()
    loss.backward()
    opt.step()
print(rank, f"{loss.item():.6f}")
dist.destroy_process_group()
