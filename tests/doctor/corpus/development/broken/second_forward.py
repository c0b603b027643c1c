# doctor: expect=saved_tensor_overwritten ranks=2 launch=torchrun
# measured: backward raises RuntimeError on every rank
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
net[1].eval()  # the teacher's statistics stay
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(dist.get_rank())
for _ in range(3):
    a, b = torch.randn(6, 4, generator=gen), torch.randn(6, 4, generator=gen)
    try:
        loss = (model(a) - model(b)).pow(2).mean()
        loss.backward()
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        print("stopped: a tensor was overwritten")
        raise SystemExit(1) from error
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
