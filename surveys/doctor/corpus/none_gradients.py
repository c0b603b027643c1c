# doctor: expect=manual_all_reduce_skips_none ranks=2 launch=torchrun
# measured: rank 0 sends 6 gradients per step, rank 1 sends 4; replicas differ
import torch
import torch.distributed as dist
import torch.nn as nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.out = nn.Linear(4, 4)

    def forward(self, x, use):
        h = self.shared(x).relu()
        return self.out(sum(self.experts[i](h) for i in use))


def average_gradients(model):
    world = dist.get_world_size()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Experts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
gen = torch.Generator().manual_seed(rank)
for step in range(6):
    x = torch.randn(8, 4, generator=gen)
    loss = nn.functional.mse_loss(model(x, [rank]), x)
    optimizer.zero_grad()
    loss.backward()
    average_gradients(model)
    optimizer.step()
print(rank, f"{model.out.weight.sum().item():.6f}")
dist.destroy_process_group()
