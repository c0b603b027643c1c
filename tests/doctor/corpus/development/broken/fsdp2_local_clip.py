# doctor: expect=clipped_local_shards ranks=2 launch=torchrun
# measured: step 1: gradient ratio 1.347, cosine 1.000; replicas differ by 6.8e-01 after 5 steps (reference: correct/fsdp2.py)
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
    shards = [p.grad.to_local() for p in model.parameters()]
    norm = nn.utils.get_total_norm(shards)
    for shard in shards:
        shard.mul_(torch.clamp(0.5 / norm, max=1.0))
    opt.step()
    opt.zero_grad()
print(rank, f"{loss.item():.6f}")
dist.destroy_process_group()
