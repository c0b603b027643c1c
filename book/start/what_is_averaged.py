"""For what_is_averaged.ipynb: gradients as arrows, and what a sample weighs."""

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
    figures.use()
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
