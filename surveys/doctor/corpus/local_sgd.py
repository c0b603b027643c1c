# doctor: expect=none ranks=2 launch=torchrun
# measured: parameters are averaged every four steps, on purpose; replicas are equal then
import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
rank, H = dist.get_rank(), 4
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
gen = torch.Generator().manual_seed(rank)
for step in range(12):
    x = torch.randn(8, 5, generator=gen)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % H == H - 1:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
print(rank, f"{loss.item():.5f}")
dist.destroy_process_group()
