# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient equals that of one process with the whole batch
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
backbone, head = nn.Linear(6, 10), nn.Linear(10, 2)
backbone.requires_grad_(False)
net = nn.Sequential(backbone, nn.ReLU(), head)
ema = copy.deepcopy(net).eval()
model = DDP(net)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=8)
gen = torch.Generator().manual_seed(1)
for step in range(8):
    x = torch.randn(16, 6, generator=gen)
    y = (x[:, 0] > 0).long()
    loss = nn.functional.cross_entropy(model(x[rank::world]), y[rank::world], label_smoothing=0.1)
    opt.zero_grad(set_to_none=False)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), net.parameters(), strict=True):
            a.lerp_(b, 0.1)
    if step % 4 == 3:
        value = loss.detach().clone()
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step} loss {value.item() / world:.5f}")
            torch.save(model.module.state_dict(), "last.pt")
        dist.barrier()
dist.destroy_process_group()
