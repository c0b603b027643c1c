"""For in_the_step.ipynb: a model in which a rank may leave out a branch, and one
gradient, averaged in half precision at many magnitudes, and in two orders.
"""

import re
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from labkit.book import figures
from labkit.launch.ranks import run_ranks
from labkit.scenarios.rare_samples import Problem
from labkit.testing.compare import Verdicts, flatten, gradient_of, verdicts

# Powers of two: multiplying by them changes no digit of a gradient in float32.
FACTORS = [2.0**power for power in range(-30, 19)]
SHOWN = {"tiny": 2.0**-26, "plain": 1.0, "large": 2.0**12}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ORDERS = ("divided before the sum", "divided after the sum")

# A gradient, the dtype that is sent, and one of ORDERS → the average, in float32.
Averaged = Callable[[Tensor, torch.dtype, str], Tensor]


class TwoBranches(nn.Module):
    """Inputs (B, 6) → (B, 1). Samples with a mean above 1 also use `right`.

    A batch without such a sample gives `right` no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.body = nn.Linear(6, 8)
            self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        outputs = self.left(hidden)
        rare = x.mean(1, keepdim=True) > 1
        if rare.any():
            outputs = outputs + rare * self.right(hidden)
        return outputs


def headline(error: Exception) -> str:
    """The first sentence of DDP's error, and the parameters that it names, sorted."""
    text = str(error)
    names = re.search(
        r"Parameters which did not receive grad for (rank \d+): (.*)", text
    )
    first = text.split(". ")[0].split(" in the prior")[0]
    if not names:
        return first
    return f"{first}\n{names[1]} lacks {', '.join(sorted(names[2].split(', ')))}"


def pull_together(problem: Problem) -> Problem:
    """The same problem early in training: targets are far off, so all ranks pull one
    way.
    """
    far = torch.where(problem.targets > 3, problem.targets, problem.targets + 4)
    return Problem(problem.model, problem.inputs, far)


def swept(problem: Problem, averaged: Averaged, world_size: int = 4) -> Verdicts:
    """Average each factor times the gradient, per dtype and order; divide it out again.

    A verdict's `variant` is "bf16, divided before the sum" and so on, followed by the
    factor: a pair. Costs one all-reduce per dtype, order and factor.
    """
    truth = flatten(gradient_of(problem.model, problem.loss)).float()
    return verdicts(run_ranks(_on_this_rank, world_size, problem, averaged), [truth])


def picked(sweep: Verdicts) -> Verdicts:
    """Of a sweep, the three magnitudes that a table shows, with readable names."""
    return Verdicts(
        verdict._replace(variant=f"{size}: {verdict.variant[0]}")
        for size, factor in SHOWN.items()
        for verdict in sweep
        if verdict.variant[1] == factor
    )


def drawn(problem: Problem, sweep: Verdicts) -> Figure:
    """Ratio against the gradient's largest element; what is infinite lies at the
    top.
    """
    figures.use()
    largest = flatten(gradient_of(problem.model, problem.loss)).abs().max().item()
    figure, axes = plt.subplots()
    for number, name in enumerate(dict.fromkeys(v.variant[0] for v in sweep)):
        ratios = [min(v.comparison.ratio, 1.6) for v in sweep if v.variant[0] == name]
        style = "-" if "before" in name else "--"
        color = figures.RANKS[number]
        axes.plot(
            [f * largest for f in FACTORS], ratios, style, lw=2, color=color, label=name
        )
    axes.set(
        xscale="log",
        xlabel="largest element of the gradient",
        ylabel="ratio (infinite: at the top)",
        ylim=(-0.05, 1.65),
    )
    axes.legend(loc="lower center", fontsize=8)
    return figure


def _on_this_rank(
    rank: int, world_size: int, problem: Problem, averaged: Averaged
) -> dict[tuple[str, float], list[Tensor]]:
    rows = problem.rows(rank, world_size)
    own = flatten(
        gradient_of(problem.model, lambda module: problem.loss(module, rows))
    ).float()
    return {
        (f"{name}, {order}", factor): [averaged(own * factor, dtype, order) / factor]
        for name, dtype in DTYPES.items()
        for order in ORDERS
        for factor in FACTORS
    }
