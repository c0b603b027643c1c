"""For in_the_optimizer.ipynb.

1. How far weights jitter around their optimum, when the gradient is nearly all noise.
2. What is needed to measure the simple noise scale tr Σ / |G|² of a gradient. Source:
   McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from labkit.scenarios.sum_and_average import batches, seeded_model
from labkit.testing.compare import flatten, gradients

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def jitter(make_optimizer: MakeOptimizer, batch: int, steps: int = 2000) -> float:
    """The RMS error of 200 weights that estimate a mean from batches of normal numbers.

    Starts at the true mean, and leaves out the first quarter of the steps.
    """
    generator = torch.Generator().manual_seed(batch)
    weights = nn.Parameter(torch.zeros(200))
    optimizer = make_optimizer([weights])
    squares = []
    for _ in range(steps):
        sample = torch.randn(batch, len(weights), generator=generator)
        weights.grad = weights.detach() - sample.mean(0)
        optimizer.step()
        squares.append(weights.detach().square().mean().item())
    settled = squares[steps // 4 :]
    return math.sqrt(sum(settled) / len(settled))


def sgd(growth: float) -> MakeOptimizer:
    """SGD with learning rate 0.01 times `growth`."""
    return lambda parameters: SGD(parameters, lr=0.01 * growth)


def adam(growth: float, kappa: float) -> MakeOptimizer:
    """Adam with learning rate 0.001 times `growth`; betas and eps for κ times the
    batch.

    Source: Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", 2022.
    """
    betas = 1 - 0.1 * kappa, 1 - 0.001 * kappa
    eps = 1e-8 / math.sqrt(kappa)
    return lambda parameters: Adam(parameters, 0.001 * growth, betas, eps)


def two_norms(
    rank: int, world_size: int, data: TensorDataset, own_batch: int
) -> list[list[float]]:
    """For `run_ranks`: per step, the gradient's squared norm before and after
    averaging.
    """
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
    """The noise scale, from the gradients of all samples one by one."""
    model = seeded_model()
    one_by_one = []
    for x, y in zip(*data.tensors, strict=True):
        model.zero_grad()
        F.cross_entropy(model(x[None]), y[None]).backward()
        one_by_one.append(flatten(gradients(model)))
    found = torch.stack(one_by_one)
    return (found.var(dim=0).sum() / found.mean(dim=0).square().sum()).item()
