"""How far weights jitter around their optimum, when the gradient is nearly all noise."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

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
    """Adam with learning rate 0.001 times `growth`; betas and eps scaled for κ times the batch.

    Source: Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022.
    """
    betas = 1 - 0.1 * kappa, 1 - 0.001 * kappa
    eps = 1e-8 / math.sqrt(kappa)
    return lambda parameters: Adam(parameters, 0.001 * growth, betas, eps)
