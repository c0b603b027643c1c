# doctor: expect=none ranks=2 launch=torchrun
# measured: both gradients equal those of one process with the whole batch
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
G = DDP(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)))
D = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), broadcast_buffers=False)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)
for step in range(6):
    real, noise = torch.randn(8, 4) + 1, torch.randn(8, 3)
    fake = G(noise)
    d_loss = F.binary_cross_entropy_with_logits(D(real), torch.ones(8, 1))
    d_loss = d_loss + F.binary_cross_entropy_with_logits(D(fake.detach()), torch.zeros(8, 1))
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()
    g_loss = F.binary_cross_entropy_with_logits(D(fake), torch.ones(8, 1))
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    print(rank, step, f"{d_loss.item():.4f} {g_loss.item():.4f}")
dist.destroy_process_group()
