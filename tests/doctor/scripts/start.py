"""What each script of this folder begins with. The first line of a script says what it is found to
be, and a part of the reason. One with `head only` in it makes its own model.
"""

import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)

def update(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# A wrapped model and its optimizer; each rank draws its own samples.
model = DDP(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
