# doctor: expect=none ranks=2 launch=torchrun
# measured: the gradient is the average up to float16's rounding
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 3)))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(1)
for _ in range(6):
    x, y = torch.randn(12, 6, generator=gen), torch.randint(0, 3, (12,), generator=gen)
    opt.zero_grad()
    loss = nn.CrossEntropyLoss()(model(x[rank::world]), y[rank::world])
    loss.backward()
    opt.step()
print(rank, f"{loss.item():.6f}")
dist.destroy_process_group()
