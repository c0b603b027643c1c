# doctor: expect=none ranks=2 launch=torchrun
# measured: the wrapper reduce-scatters averages; gradient equals that of one process
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), device_id=torch.device("cpu"))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(1)
for _ in range(5):
    x, y = torch.randn(12, 8, generator=gen), torch.randint(0, 4, (12,), generator=gen)
    loss = nn.functional.cross_entropy(model(x[rank::world]), y[rank::world])
    opt.zero_grad()
    loss.backward()
    model.clip_grad_norm_(1.0)
    opt.step()
print(rank, f"{loss.item():.6f}")
dist.destroy_process_group()
