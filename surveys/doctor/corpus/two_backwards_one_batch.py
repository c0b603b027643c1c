# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient equals that of one process with the whole batch
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(6, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(1)
for _ in range(5):
    x = torch.randn(8, 6, generator=gen)[rank::world]
    opt.zero_grad()
    for task in (0, 1):  # one loss per task, added by backward itself
        out = model(x)[:, 2 * task : 2 * task + 2]
        loss = nn.functional.mse_loss(out, x[:, task : task + 2])
        loss.backward()
    opt.step()
print(rank, f"{loss.item():.6f}")
dist.destroy_process_group()
