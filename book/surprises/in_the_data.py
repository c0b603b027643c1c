"""For in_the_data.ipynb: how noisy one step is when all ranks draw the same dropout
masks, or their own; and a figure of how samples are dealt to ranks and steps.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from labkit.book import figures
from labkit.launch.ranks import run_ranks
from labkit.scenarios.rare_samples import Problem
from labkit.testing.compare import flatten, gradient_of

STEPS, MASKS = 200, 4000


class Noise(NamedTuple):
    """How noisy the averaged gradient is, over many steps at fixed weights.

    Attributes:
        off: root mean square distance from the expected gradient, relative to its norm.
        ratio: norm of the mean over all steps, relative to the expected gradient's.
        cosine: of the mean over all steps and the expected gradient.
        correlation: ρ, of two ranks' deviations within a step, each from its own mean.
    """

    off: float
    ratio: float
    cosine: float
    correlation: float


def dropping(inputs: Tensor, targets: Tensor) -> Problem:
    """A problem whose MLP drops half of its hidden units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)
        )
    return Problem(model, inputs, targets)


def alike() -> Problem:
    """Sixteen nearly identical samples, so that masks matter more than samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        inputs = 1 + 0.3 * torch.randn(16, 6)
    return dropping(inputs, inputs.mean(1, keepdim=True))


def noise(
    problem: Problem, seed_of: Callable[[int], int], world_size: int = 4
) -> Noise:
    """The noise of a step if each rank calls `torch.manual_seed(seed_of(rank))`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        repeated = Problem(
            problem.model,
            problem.inputs.repeat(MASKS, 1),
            problem.targets.repeat(MASKS, 1),
        )
        expected = flatten(gradient_of(repeated.model, repeated.loss))
    of_ranks = run_ranks(_on_this_rank, world_size, problem, seed_of)
    return _noise(torch.stack(of_ranks), expected)


def _on_this_rank(
    rank: int, world_size: int, problem: Problem, seed_of: Callable[[int], int]
) -> Tensor:
    rows = problem.rows(rank, world_size)
    torch.manual_seed(seed_of(rank))
    steps = [
        gradient_of(problem.model, lambda module: problem.loss(module, rows))
        for _ in range(STEPS)
    ]
    return torch.stack([flatten(step) for step in steps])


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


def sample_grid() -> Figure:
    """Ten samples on four ranks, in one panel per way to deal them: a row per rank, a
    column per step.

    A sample that occurs twice in a panel is orange where it occurs again (step by step,
    and within a step by rank). A step in which a rank has no sample is an empty gray
    cell.
    """
    figures.use()
    panels = {
        "default: padded to 12": _dealt(shuffle=False),
        "drop_last=True: 8 and 9 never occur": _dealt(shuffle=False, drop_last=True),
        "every W-th: an uneven tail": [list(range(rank, 10, 4)) for rank in range(4)],
        "shuffled, set_epoch(1)": _dealt(epoch=1),
    }
    figure, grid = plt.subplots(2, 2, figsize=(6.4, 3.8))
    for axes, (title, of_ranks) in zip(grid.flat, panels.items(), strict=True):
        steps = max(map(len, of_ranks))
        _draw_cells(axes, of_ranks, steps)
        axes.set(xlim=(0, steps), ylim=(len(of_ranks), 0))
        axes.set_xticks(
            [i + 0.5 for i in range(steps)], [f"step {i + 1}" for i in range(steps)]
        )
        ranks = range(len(of_ranks))
        axes.set_yticks([r + 0.5 for r in ranks], [f"rank {r}" for r in ranks])
        axes.tick_params(length=0, labelsize=8)
        axes.set_title(title, fontsize=9)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def _dealt(epoch: int = 0, **options: bool) -> list[list[int]]:
    samplers = [DistributedSampler(range(10), 4, rank, **options) for rank in range(4)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def _draw_cells(axes: Axes, of_ranks: Sequence[Sequence[int]], steps: int) -> None:
    seen: set[int] = set()
    for step in range(steps):
        for rank, samples in enumerate(of_ranks):
            here = samples[step] if step < len(samples) else None
            color = "#dddddd" if here is None else "white"
            if here in seen:
                color = figures.RANKS[1]
            cell = Rectangle((step, rank), 1, 1, facecolor=color, edgecolor="#666666")
            axes.add_patch(cell)
            if here is not None:
                seen.add(here)
                middle = step + 0.5, rank + 0.5
                axes.text(*middle, str(here), ha="center", va="center")
