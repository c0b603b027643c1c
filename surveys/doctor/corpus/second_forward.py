# doctor: expect=saved_tensor_overwritten ranks=2 launch=torchrun
# measured: the generator's backward raises RuntimeError on every rank
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
G = DDP(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)))
D = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
opt_g = torch.optim.SGD(G.parameters(), lr=0.1)
opt_d = torch.optim.SGD(D.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(dist.get_rank())
for _ in range(3):
    real, noise = torch.randn(8, 4, generator=gen), torch.randn(8, 3, generator=gen)
    score = D(G(noise))
    d_loss = F.softplus(score).mean() - D(real).mean()
    g_loss = F.softplus(-score).mean()
    opt_d.zero_grad()
    d_loss.backward(retain_graph=True)
    opt_d.step()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
dist.destroy_process_group()
