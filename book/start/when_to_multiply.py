"""For when_to_multiply.ipynb: one loss with three factors, and two figures.

    def loss(outputs, targets):  # what a rank back-propagates, from its own samples
        return F.mse_loss(outputs, targets, reduction="sum") / 24

    experiment = Experiment(model, inputs, targets, average_gradients)
    print(factor_table(try_factors(experiment, loss, meant=F.mse_loss)))

`meant` is the loss of one process that has every sample. A loss may call collectives.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor, nn

from labkit.book import figures, table
from labkit.testing import gradient_of, try_variants
from labkit.testing.compare import Comparison

Loss = Callable[[Tensor, Tensor], Tensor]


class Experiment(NamedTuple):
    """What stays the same while losses and factors are tried.

    Attributes:
        model: called as `model(inputs)`.
        inputs: every sample, (N, …).
        targets: one per sample, (N, …).
        combine: called on every rank after backward; combines the gradients of its
            argument.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    combine: Callable[[nn.Module], None]


def try_factors(
    experiment: Experiment, loss: Loss, meant: Loss, counts: Sequence[int] = (3, 3)
) -> dict[str, Comparison]:
    """The combined gradient of `loss`, times 1, W, and 1/W, compared with `meant`'s.

    Rank r has the next `counts[r]` samples; `loss` gets its outputs and targets there.
    Raises RuntimeError if the ranks end with different bits.
    """
    model, inputs, targets, combine = experiment

    def with_factor(factor: float) -> Callable[[nn.Module, slice], None]:
        def variant(module: nn.Module, rows: slice) -> None:
            (factor * loss(module(inputs[rows]), targets[rows])).backward()
            combine(module)

        return variant

    factors = {"×1": 1.0, "×W": len(counts), "×1/W": 1 / len(counts)}
    variants = {name: with_factor(factor) for name, factor in factors.items()}
    truth = gradient_of(model, lambda alone: meant(alone(inputs), targets))
    judged = try_variants(model, variants, truth, counts).verdicts
    if any(verdict.ranks != "all" for verdict in judged):
        raise RuntimeError("the ranks hold different gradients after `combine`")
    return {verdict.variant: verdict.comparison for verdict in judged}


def factor_table(found: Mapping[str, Comparison]) -> str:
    """One row: the ratio with each factor, the cosine, and the factor that is right.

    Right is a ratio and a cosine of 1 up to rounding in float32. The cosine is the one
    of the first factor: a positive factor does not change it.
    """
    cosine = next(iter(found.values())).cosine
    right = [
        name
        for name, one in found.items()
        if abs(one.ratio - 1) < 1e-5 and one.cosine > 1 - 1e-9
    ]
    headers = [*(f"ratio, {name}" for name in found), "cosine", "right"]
    ratios = [comparison.ratio for comparison in found.values()]
    return table(headers, [[*ratios, cosine, ", ".join(right) or "none"]])


NO_FACTOR = "no factor\nrepairs it"
TREE = {
    "AVERAGED; the loss\nsees own samples only": {
        "divide by\nown count": [("equal counts", "×1"), ("unequal counts", NO_FACTOR)],
        "divide by the\nglobal count": [("", "×W")],
        'do not divide\n(reduction="sum")': [("", "×W")],
    },
    "AVERAGED; the loss sees\nsamples of all ranks": {
        "each rank computes\nthe WHOLE loss": [
            ("gather carries gradient", "×1"),
            ("plain gather, own\nslice reinserted", "×W"),
        ],
        "each rank computes\nits OWN ROWS of it": [
            ("gather carries gradient,\ndivide by global count", "×W"),
            ("gather carries gradient,\ndivide by own count", "×1"),
            ("plain gather", NO_FACTOR),
        ],
    },
    "gradients are\nSUMMED over ranks": {
        "divide by the\nglobal count": [("", "×1")],
        "divide by own count,\nequal on all ranks": [("", "×1/W")],
    },
}
COLORS = {"×1": figures.RANKS[2], "×1/W": figures.RANKS[1], "×W": figures.RANKS[0]}
_BOX = {"boxstyle": "round,pad=0.35", "fc": "#f2f2f2", "ec": "#888888"}
_TEXT = {"ha": "center", "va": "center", "fontsize": 8.5, "color": "#222222"}
_COLUMNS = (1.45, 4.35, 7.1, 9.35)


def decision_tree() -> Figure:
    """Draw `TREE`: first answer → second → its leaves, numbered from 1 in their order.

    A third answer may be empty: then the second leads straight to its leaf.
    """
    leaves = sum(len(ends) for answers in TREE.values() for ends in answers.values())
    figure, axes = plt.subplots(figsize=(6.6, 0.62 * leaves + 0.3))
    axes.axis("off")
    axes.set(xlim=(0, 10.1), ylim=(leaves - 0.4, -0.6))
    first, second, third, last = _COLUMNS
    number = count()
    for question, answers in TREE.items():
        branch_rows = []
        for answer, ends in answers.items():
            rows = [next(number) for _ in ends]
            middle = sum(rows) / len(rows)
            branch_rows.append(middle)
            axes.text(second, middle, answer, bbox=_BOX, **_TEXT)
            for row, (end, verdict) in zip(rows, ends, strict=True):
                _line(axes, (second, middle), (last, row))
                if end:
                    axes.text(third, row, end, bbox=_BOX, **_TEXT)
                _leaf(axes, last, row, verdict)
        middle = sum(branch_rows) / len(branch_rows)
        axes.text(first, middle, question, bbox=_BOX, **_TEXT)
        for row in branch_rows:
            _line(axes, (first, middle), (second, row))
    return figure


def _line(axes: plt.Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Level at first, then a slope, then level again at the height of the end."""
    (x, y), (to_x, to_y) = start, end
    bend = x + 1.35
    axes.plot(
        [x, bend, bend + 0.35, to_x],
        [y, y, to_y, to_y],
        color="#888888",
        lw=1,
        zorder=0,
    )


def _leaf(axes: plt.Axes, x: float, row: int, verdict: str) -> None:
    color = COLORS.get(verdict, figures.WRONG)
    box = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": color, "lw": 2}
    text = f"leaf {row + 1}\n{verdict}"
    axes.text(x, row, text, bbox=box, **(_TEXT | {"color": color}))


def switchboard(found: Mapping[str, Comparison]) -> Figure:
    """Draw every comparison: a square where a number is wrong, a circle where right.

    Ratios have to lie between 0.4 and 2.5, and angles between 0 and 90 degrees.
    """
    size = (6.4, 0.8 + 0.38 * len(found))
    figure, (ratios, angles) = plt.subplots(1, 2, figsize=size, sharey=True)
    for row, comparison in enumerate(found.values()):
        cosine = min(1.0, comparison.cosine)  # rounding may move it past 1
        angle = math.degrees(math.acos(cosine))
        _dot(ratios, comparison.ratio, row, right=abs(comparison.ratio - 1) < 1e-4)
        _dot(angles, angle, row, right=comparison.cosine > 1 - 1e-4)
    for axes, truth in ((ratios, 1), (angles, 0)):
        axes.axvline(truth, color=figures.TRUTH, lw=1, ls="--", zorder=0)
    ratios.set_xscale("log", base=2)
    ratios.set(xlim=(0.4, 2.5), xlabel="ratio")
    ratios.set_xticks([0.5, 1, 2], ["1/2", "1", "2"])
    ratios.set_yticks(range(len(found)), list(found), fontsize=9)
    ratios.set_ylim(len(found) - 0.5, -0.5)
    angles.set(xlim=(-4, 94), xticks=range(0, 91, 30), xlabel="angle, degrees")
    return figure


def _dot(axes: plt.Axes, x: float, row: int, *, right: bool) -> None:
    color = figures.RANKS[2] if right else figures.WRONG
    axes.plot(x, row, "o" if right else "s", color=color, ms=7)
