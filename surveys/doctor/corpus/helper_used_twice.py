# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient equals that of one process with the whole batch
"""Two heads share one loss helper; W is a matrix here, not the world size."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def bce(logits, value):
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.a(h), self.b(h)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(TwoHeads())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
W = torch.randn(4, 4)
gen = torch.Generator().manual_seed(1)
for _ in range(5):
    x = torch.randn(8, 4, generator=gen)[rank::world] @ W
    a, b = model(x)
    loss = bce(a, 1.0) + bce(b, 0.0)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(rank, f"{loss.item():.6f}")
dist.destroy_process_group()
