"""For in_the_step.ipynb.

1. A table with one line per variant, whether or not its ranks agree.
2. A model in which a rank may leave out a branch, and what DDP's error says about it.
3. One gradient, averaged in half precision at many magnitudes and in two orders.
4. Two figures of a step.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from labkit.book import figures
from labkit.launch.ranks import run_ranks
from labkit.scenarios.rare_samples import Problem
from labkit.tables import table
from labkit.testing.compare import flatten
from labkit.testing.variants import Tried
from labkit.testing.verdict import Verdict, gradient_of, verdicts


def brief(tried: Tried, *headers: str) -> str:
    """`Tried.table` with one line per variant: where the ranks differ, from their
    smallest ratio and cosine to their largest.

    The verdict and the notes are those of the last rank.
    """
    lines = {}
    for verdict, notes in zip(tried.verdicts, tried.notes, strict=True):
        found = [v for v in tried.verdicts if v.variant == verdict.variant]
        columns = zip(*(v.comparison for v in found), strict=True)
        ranges = [f"{min(numbers):.4f} to {max(numbers):.4f}" for numbers in columns]
        agree = verdict.ranks == "all"
        numbers = ["all", *verdict.comparison] if agree else ["differ", *ranges]
        lines[verdict.variant] = [verdict.variant, *numbers, verdict.kind, *notes]
    headers = ("variant", "ranks", "ratio", "cosine", "verdict", *headers)
    return table(headers, list(lines.values()))


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


# Powers of two: multiplying by them changes no digit of a gradient in float32.
FACTORS = [2.0**power for power in range(-30, 19)]
SHOWN = {"tiny": 2.0**-26, "plain": 1.0, "large": 2.0**12}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ORDERS = ("divided before the sum", "divided after the sum")

# A gradient, the dtype that is sent, and one of ORDERS → the average, in float32.
Averaged = Callable[[Tensor, torch.dtype, str], Tensor]


def pull_together(problem: Problem) -> Problem:
    """The same problem early in training: targets are far off, so all ranks pull one
    way.
    """
    far = torch.where(problem.targets > 3, problem.targets, problem.targets + 4)
    return Problem(problem.model, problem.inputs, far)


def swept(problem: Problem, averaged: Averaged, world_size: int = 4) -> list[Verdict]:
    """Average each factor times the gradient, per dtype and order; divide it out again.

    A verdict's `variant` is "bf16, divided before the sum" and so on, followed by the
    factor: a pair. Costs one all-reduce per dtype, order and factor.
    """
    truth = flatten(gradient_of(problem.model, problem.loss)).float()
    return verdicts(run_ranks(_on_this_rank, world_size, problem, averaged), [truth])


def picked(sweep: list[Verdict]) -> list[Verdict]:
    """Of a sweep, the three magnitudes that a table shows, with readable names."""
    return [
        verdict._replace(variant=f"{size}: {verdict.variant[0]}")
        for size, factor in SHOWN.items()
        for verdict in sweep
        if verdict.variant[1] == factor
    ]


def drawn(problem: Problem, sweep: list[Verdict]) -> Figure:
    """Ratio against the gradient's largest element; what is infinite lies at the
    top.
    """
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


_LOCAL, _AVERAGED = figures.RANKS[1], figures.RANKS[0]


# Name; whether the gradient is averaged in it (None: there is none yet); what may go
# wrong there.
PHASES: list[tuple[str, bool | None, list[str]]] = [
    (
        "wrap, load",
        None,
        [
            "wrapper not kept",
            "checkpoint loaded on rank 0 alone",
            "static_graph started under no_sync",
        ],
    ),
    ("zero_grad", None, ["in every micro-batch, or never"]),
    ("forward", None, ["no_sync around the wrong half"]),
    (
        "backward: gradients",
        False,
        [
            "hook reads this rank's own gradient",
            "second backward through one forward",
            "reentrant checkpoint used twice",
            "parameter without a gradient; rank that skips alone",
            "clipped before the average",
        ],
    ),
    (
        "all-reduce",
        False,
        ["another order of additions", "fp16 overflow or underflow"],
    ),
    ("unscale", True, ["infinity found on one rank; different scales"]),
    ("clip", True, ["clipped at every micro-batch"]),
    ("optimizer step", True, ["weights averaged instead of gradients"]),
    ("scheduler step", True, ["W times per step"]),
]


def step_map() -> Figure:
    """A training step from top to bottom, and what may go wrong in each phase."""
    figures.use()
    lines = sum(len(surprises) for _, _, surprises in PHASES)
    figure, axes = plt.subplots(figsize=(6.4, 0.5 + 0.3 * lines))
    top = 0.0
    for name, averaged, surprises in PHASES:
        height = len(surprises)
        color = {None: "#999999", False: _LOCAL, True: _AVERAGED}[averaged]
        axes.add_patch(
            Rectangle((0, top + 0.08), 2.7, height - 0.16, color=color, alpha=0.25)
        )
        axes.text(0.12, top + height / 2, name, va="center", fontsize=10)
        for number, surprise in enumerate(surprises):
            axes.text(2.9, top + number + 0.5, surprise, va="center", fontsize=9)
        top += height
    axes.text(0, -0.35, "orange: this rank's own gradient", color="#9a6a00", fontsize=9)
    right = "blue: the average, equal on every rank"
    axes.text(2.9, -0.35, right, color=_AVERAGED, fontsize=9)
    axes.set(xlim=(-0.1, 8), ylim=(top + 0.1, -0.8))
    axes.axis("off")
    return figure


def no_sync_timeline(
    places: Mapping[str, Sequence[tuple[bool, bool]]], tried: Tried
) -> Figure:
    """Per placement of `no_sync`, its micro-batches as forward and backward boxes.

    Args:
        places: for each, one pair per micro-batch: whether its forward is under
            `no_sync`, and whether its backward is.
        tried: with the number of collectives in each of these backwards as notes.
    """
    launched = {
        verdict.variant: notes
        for verdict, notes in zip(tried.verdicts, tried.notes, strict=True)
    }
    figure, _ = plt.subplots(
        len(places), 1, figsize=(6.4, 0.95 * len(places) + 0.3), sharex=True
    )
    for axes, (name, micro_batches) in zip(figure.axes, places.items(), strict=True):
        for number, inside in enumerate(micro_batches):
            count = launched[name][number]
            _micro_batch(axes, 4.0 * number, number + 1, *inside, count > 0)
        axes.set(
            xlim=(-0.1, 4.0 * len(micro_batches)),
            ylim=(-0.75, 1.5),
            yticks=[],
            xticks=[],
        )
        axes.set_title(f"no_sync around {name}", fontsize=10, pad=2)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.axes[-1].set_xlabel(
        "time → (gray: inside no_sync; blue: an all-reduce)", fontsize=9
    )
    return figure


def _micro_batch(
    axes: Axes, start: float, number: int, forward: bool, backward: bool, launched: bool
) -> None:
    for offset, width, inside, name in (
        (0.0, 1.3, forward, f"forward {number}"),
        (1.5, 2.0, backward, f"backward {number}"),
    ):
        left = start + offset
        if inside:
            gray = Rectangle(
                (left - 0.08, -0.12), width + 0.16, 1.24, color="#bbbbbb", lw=0
            )
            axes.add_patch(gray)
        axes.add_patch(
            Rectangle((left, 0), width, 1, facecolor="white", edgecolor="#444444")
        )
        axes.text(left + width / 2, 0.5, name, ha="center", va="center", fontsize=9)
    if launched:
        axes.add_patch(Rectangle((start + 2.3, -0.6), 1.2, 0.4, color=_AVERAGED))
