# doctor: expect=none ranks=2 launch=torchrun
# measured: fully_shard averages; gradient equals that of one process with the whole batch
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
gen = torch.Generator().manual_seed(1)
for _ in range(5):
    x, y = torch.randn(12, 8, generator=gen), torch.randint(0, 4, (12,), generator=gen)
    loss = nn.functional.cross_entropy(model(x[rank::world]), y[rank::world])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    opt.zero_grad()
print(rank, f"{loss.item():.6f}")
dist.destroy_process_group()
