"""Our own script for lejepa: its sliced Epps-Pulley test on two views, a small network, DDP.

SciPy, which other tests of the repository use, is replaced by a mock.
"""

import importlib
import os
import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, os.getcwd())
sys.modules.update({"scipy": MagicMock(), "scipy.stats": MagicMock()})
EppsPulley = importlib.import_module("lejepa.univariate.epps_pulley").EppsPulley
Slices = importlib.import_module("lejepa.multivariate.slicing").SlicingUnivariateTest

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
torch.manual_seed(0)
views = torch.randn(64, 2, 16)
network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
model = DistributedDataParallel(network, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sketched = Slices(EppsPulley(), num_slices=16).cuda()
dataset = TensorDataset(views[:, 0], views[:, 1])
for first, second in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
    both = model(torch.cat([first, second]).cuda())
    one, other = both.chunk(2)
    loss = (one - other).square().mean() + 0.05 * sketched(both)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
