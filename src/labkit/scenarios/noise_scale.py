"""What is needed to measure the simple noise scale tr Σ / |G|² of a gradient.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from labkit.scenarios.sum_and_average import batches, seeded_model
from labkit.testing.compare import flatten, gradients


def two_norms(rank: int, world_size: int, data: TensorDataset, own_batch: int) -> list[list[float]]:
    """For `run_ranks`: per step, the squared norm of the gradient before and after the average."""
    model = seeded_model()
    ddp = DistributedDataParallel(model)
    local: dict[Tensor, Tensor] = {}
    for p in model.parameters():
        p.register_hook(lambda gradient, p=p: local.update({p: gradient.clone()}))
    norms = []
    for x, y in batches(data, own_batch, rank, world_size):
        model.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        both = flatten(local.values()), flatten(gradients(model))
        norms.append([g.square().sum().item() for g in both])
    return norms


def from_each_sample(data: TensorDataset) -> float:
    """The noise scale, from the gradients of all samples one by one, at the seeded model."""
    model = seeded_model()
    one_by_one = []
    for x, y in zip(*data.tensors, strict=True):
        model.zero_grad()
        F.cross_entropy(model(x[None]), y[None]).backward()
        one_by_one.append(flatten(gradients(model)))
    found = torch.stack(one_by_one)
    return (found.var(dim=0).sum() / found.mean(dim=0).square().sum()).item()
