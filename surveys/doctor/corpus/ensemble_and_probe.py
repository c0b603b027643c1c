# doctor: expect=none ranks=2 launch=torchrun
# measured: each rank trains a model of its own, on purpose; rank 0 fits a probe afterwards
import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(50 + rank)
member = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(member.parameters(), lr=1e-2)
for _ in range(6):
    x = torch.randn(8, 4)
    loss = nn.functional.mse_loss(member(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
x = torch.ones(2, 4)
vote = member(x).detach()
dist.all_reduce(vote)
if rank == 0:
    probe = nn.Linear(4, 1)
    probe_opt = torch.optim.SGD(probe.parameters(), lr=0.1)
    for _ in range(3):
        probe_opt.zero_grad()
        nn.functional.mse_loss(probe(x), vote / 2).backward()
        probe_opt.step()
print(rank, f"{vote.mean().item() / 2:.5f}")
dist.barrier()
dist.destroy_process_group()
