"""Our own script for a repository's loss: two views of random samples, a small network, DDP.

train_with_a_loss.py MODULE CLASS [KEYWORD=NUMBER …]
"""

import ast
import importlib
import inspect
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.getcwd())
module, name, *keywords = sys.argv[1:]
kind = getattr(importlib.import_module(module), name)
given = {key: ast.literal_eval(value) for key, value in (one.split("=") for one in keywords)}

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
model = DistributedDataParallel(network, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seeded = torch.Generator().manual_seed(dist.get_rank())
for _ in range(8):
    views = torch.randn(8, 2, 16, generator=seeded).cuda()
    first, second = model(views).unbind(1)
    sizes = {"world_size": dist.get_world_size(), "rank": dist.get_rank(), "batch_size": len(views)}
    wanted = inspect.signature(kind).parameters
    criterion = kind(**given, **{key: n for key, n in sizes.items() if key in wanted})
    scale = (
        {"logit_scale": 10.0}
        if "logit_scale" in inspect.signature(criterion.forward).parameters
        else {}
    )
    loss = criterion(first, second, **scale)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
