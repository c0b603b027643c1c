"""How noisy one step is when all ranks draw the same dropout masks, or their own."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from labkit.launch.ranks import run_ranks
from labkit.scenarios.rare_samples import Problem
from labkit.testing.compare import flatten
from labkit.testing.verdict import gradient_of

STEPS, MASKS = 200, 4000


class Noise(NamedTuple):
    """How noisy the averaged gradient is, over many steps at fixed weights.

    Attributes:
        off: root mean square distance from the expected gradient, relative to its norm.
        ratio: norm of the mean over all steps, relative to the expected gradient's.
        cosine: of the mean over all steps and the expected gradient.
        correlation: ρ, of two ranks' deviations within a step, each from the rank's own mean.
    """

    off: float
    ratio: float
    cosine: float
    correlation: float


def dropping(inputs: Tensor, targets: Tensor) -> Problem:
    """A problem whose MLP drops half of its hidden units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    return Problem(model, inputs, targets)


def alike() -> Problem:
    """Sixteen nearly identical samples, so that masks matter more than samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        inputs = 1 + 0.3 * torch.randn(16, 6)
    return dropping(inputs, inputs.mean(1, keepdim=True))


def noise(problem: Problem, world_size: int = 4) -> dict[str, Noise]:
    """The noise of a step with one seed on all ranks, and with seed + rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        repeated = Problem(
            problem.model, problem.inputs.repeat(MASKS, 1), problem.targets.repeat(MASKS, 1)
        )
        expected = flatten(gradient_of(repeated.model, repeated.loss))
    of_ranks = run_ranks(_on_this_rank, world_size, problem)
    return {
        name: _noise(torch.stack([drawn[name] for drawn in of_ranks]), expected)
        for name in of_ranks[0]
    }


def _on_this_rank(rank: int, world_size: int, problem: Problem) -> dict[str, Tensor]:
    rows = problem.rows(rank, world_size)
    found = {}
    for name, seed in {"one seed": 0, "seed + rank": 100 + rank}.items():
        torch.manual_seed(seed)
        drawn = [
            flatten(gradient_of(problem.model, lambda module: problem.loss(module, rows)))
            for _ in range(STEPS)
        ]
        found[name] = torch.stack(drawn)
    return found


def _noise(own: Tensor, expected: Tensor) -> Noise:
    """Of `own`, (ranks, steps, elements), and the expected gradient, (elements,)."""
    averaged = own.mean(0)
    mean = averaged.mean(0)
    off = (averaged - expected).square().sum(1).mean().sqrt() / expected.norm()
    cosine = mean @ expected / (mean.norm() * expected.norm())
    apart = own - own.mean(1, keepdim=True)
    products = torch.einsum("rsp,qsp->rq", apart, apart)
    world_size = len(own)
    between = (products.sum() - products.trace()) / (world_size - 1)
    numbers = (off, mean.norm() / expected.norm(), cosine, between / products.trace())
    return Noise(*(number.item() for number in numbers))
