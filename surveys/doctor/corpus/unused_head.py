# doctor: expect=replicas_drift ranks=2 launch=torchrun
# measured: the second forward raises RuntimeError on every rank
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = self.body(x).relu()
        return self.head(h), self.aux(h)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(dist.get_rank())
for _ in range(4):
    x, y = torch.randn(6, 4, generator=gen), torch.randint(0, 3, (6,), generator=gen)
    logits, _ = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
