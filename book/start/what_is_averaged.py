"""For what_is_averaged.ipynb: one node and one step, gradients as arrows, and what a
sample weighs.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from labkit.book import figures


def gradient_arrows(of_ranks: Sequence[Tensor], full_batch: Tensor) -> Figure:
    """A colored arrow per rank, a black one for their average, a circle at the truth.

    Args:
        of_ranks: each rank's gradient, shape (2,); at most four ranks, which is how
            many colors there are.
        full_batch: the gradient of one process that has every sample, shape (2,).
    """
    figure, axes = plt.subplots(figsize=(6, 4.2))
    for rank, gradient in enumerate(of_ranks):
        color = figures.RANKS[rank]
        _arrow(axes, gradient, color, width=2)
        beyond_its_head = gradient + 0.28 * nn.functional.normalize(gradient, dim=0)
        axes.text(
            *beyond_its_head.tolist(),
            f"rank {rank}",
            color=color,
            ha="center",
            va="center",
        )
    _arrow(axes, torch.stack(list(of_ranks)).mean(dim=0), figures.TRUTH, width=3)
    axes.plot([], [], color=figures.TRUTH, lw=3, label="average of the ranks")
    circle = {"mfc": "none", "mec": figures.TRUTH, "mew": 1.5, "ls": "none"}
    axes.plot(
        *full_batch.tolist(), "o", ms=16, label="one process, full batch", **circle
    )
    ends = torch.stack([*of_ranks, full_batch, torch.zeros(2)])
    (left, bottom), (right, top) = ends.amin(dim=0).tolist(), ends.amax(dim=0).tolist()
    axes.set(xlim=(left - 0.5, right + 0.6), ylim=(bottom - 0.5, top + 0.4))
    axes.set(xlabel="gradient of weight 0", ylabel="gradient of weight 1")
    axes.legend(loc="upper right")
    return figure


def _arrow(axes: plt.Axes, to: Tensor, color: str, width: float) -> None:
    style = {
        "arrowstyle": "-|>",
        "shrinkA": 0,
        "shrinkB": 0,
        "color": color,
        "lw": width,
    }
    axes.annotate("", to.tolist(), (0, 0), arrowprops=style)


def sample_weights(counts: Sequence[int], divisors: Sequence[float]) -> list[float]:
    """Each sample's weight in (1/W) Σ_r (Σ_{i on r} ℓ_i / divisor_r), in rank order.

    Rank r holds `counts[r]` samples and divides its summed loss by `divisors[r]`. The
    weights of a mean over all N samples are 1/N each.
    """
    world_size = len(counts)
    weights = []
    for count, divisor in zip(counts, divisors, strict=True):
        weights += [1 / (world_size * divisor)] * count
    return weights


def weight_bars(counts: Sequence[int], ways: Mapping[str, Sequence[float]]) -> Figure:
    """One panel per way: a bar per sample, colored by rank, and a dashed line at 1/N.

    `ways` maps a title to the ranks' divisors, as `sample_weights` takes them. Each
    rank's bars are labeled with the weight as a fraction. At most four ranks, which is
    how many colors exist.
    """
    owner = [rank for rank, count in enumerate(counts) for _ in range(count)]
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    centers = [
        start + (count - 1) / 2 for start, count in zip(starts, counts, strict=True)
    ]
    figure, _ = plt.subplots(1, len(ways), sharey=True, figsize=(3.2 * len(ways), 2.9))
    for axes, (title, divisors) in zip(figure.axes, ways.items(), strict=True):
        weights = sample_weights(counts, divisors)
        axes.bar(
            range(len(weights)), weights, color=[figures.RANKS[rank] for rank in owner]
        )
        axes.axhline(1 / len(weights), color=figures.TRUTH, ls="--", lw=1)
        for rank, center in enumerate(centers):
            if not counts[rank]:
                continue
            weight = weights[owner.index(rank)]
            label = str(Fraction(weight).limit_denominator(1000))
            axes.text(center, weight, label, ha="center", va="bottom", fontsize=10)
        axes.set_title(title, fontsize=11)
        axes.set_xticks(centers, [str(rank) for rank in range(len(counts))])
        axes.set(xlabel="rank that holds the sample")
        axes.margins(y=0.12)
        axes.tick_params(axis="x", length=0)
    figure.axes[0].set_ylabel("weight of each sample")
    return figure


_WHITE = {"ha": "center", "va": "center", "color": "white", "fontsize": 9}
_DARK = {"ha": "center", "va": "center", "color": figures.TRUTH, "fontsize": 9}
_SMALL = {**_DARK, "fontsize": 7.5}
_STEP = (("load", 0.7), ("forward", 1.3), ("backward", 2.6), ("optimizer", 1.1))


def node_and_step(ranks: int = 2) -> Figure:
    """On the left what torchrun starts on one node, on the right one step of each rank.

    All-reduces are drawn below backward, which they overlap.
    """
    size = {"figsize": (8.4, 2.9), "width_ratios": (1, 1.9)}
    figure, (node, step) = plt.subplots(1, 2, **size)
    node.add_patch(plt.Rectangle((0, 0), 4, 2.5 * ranks + 0.6, fc="#F2F4F6", ec="0.4"))
    node.text(2, 2.5 * ranks + 0.25, "node: one machine", **_DARK)
    for rank in range(ranks):
        color, low = figures.RANKS[rank], 2.5 * (ranks - 1 - rank) + 0.25
        node.add_patch(plt.Rectangle((0.25, low), 3.5, 2.2, fc="white", ec=color, lw=2))
        node.text(2, low + 1.75, f"process: rank {rank}", **_DARK)
        node.text(2, low + 1.2, f"model, optimizer, share {rank} of the data", **_SMALL)
        node.add_patch(plt.Rectangle((1.1, low + 0.2), 1.8, 0.6, fc=color))
        node.text(2, low + 0.5, f"GPU {rank}", **(_WHITE if rank == 0 else _DARK))
        _one_step(step, rank, 2.5 * (ranks - 1 - rank) + 0.7)
    node.set(xlim=(-0.1, 4.1), ylim=(-0.1, 2.5 * ranks + 0.7))
    step.set(xlim=(-0.1, 6.4), ylim=node.get_ylim())
    step.annotate("", (5.7, 0.05), (0, 0.05), arrowprops={"arrowstyle": "->"})
    step.text(5.75, 0.05, "time", va="center", fontsize=9)
    for axes in (node, step):
        axes.set_axis_off()
    return figure


def _one_step(axes: plt.Axes, rank: int, low: float) -> None:
    begin, color = 0.0, figures.RANKS[rank]
    for name, length in _STEP:
        box = plt.Rectangle((begin, low + 0.6), length, 0.6, fc=color, ec="white")
        axes.add_patch(box)
        ink = _WHITE if rank == 0 else _DARK
        axes.text(begin + length / 2, low + 0.9, name, **{**ink, "fontsize": 8.5})
        if name == "backward":
            for first in (0.7, 1.3, 1.9):
                message = plt.Rectangle(
                    (begin + first, low), 0.55, 0.45, fc="0.75", ec="white"
                )
                axes.add_patch(message)
            text = begin + 2.55, low + 0.22
            axes.text(*text, "all-reduces", va="center", fontsize=8, color="0.3")
        begin += length
    axes.text(0, low + 0.22, f"rank {rank}", va="center", fontsize=9, color="0.3")
