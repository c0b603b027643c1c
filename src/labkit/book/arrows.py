"""Gradients of a model with two weights as arrows in the plane: each rank's, and their average."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from labkit.book import figures


def gradient_arrows(of_ranks: Sequence[Tensor], full_batch: Tensor) -> Figure:
    """One colored arrow per rank, a black one for their average, a circle at the full batch.

    Args:
        of_ranks: each rank's gradient, shape (2,); at most four ranks, which is how many colors
            there are.
        full_batch: the gradient of one process that has every sample, shape (2,).
    """
    figure, axes = plt.subplots(figsize=(6, 4.2))
    for rank, gradient in enumerate(of_ranks):
        color = figures.RANKS[rank]
        _arrow(axes, gradient, color, width=2)
        beyond_its_head = gradient + 0.28 * nn.functional.normalize(gradient, dim=0)
        axes.text(*beyond_its_head.tolist(), f"rank {rank}", color=color, ha="center", va="center")
    _arrow(axes, torch.stack(list(of_ranks)).mean(dim=0), figures.TRUTH, width=3)
    axes.plot([], [], color=figures.TRUTH, lw=3, label="average of the ranks")
    circle = {"mfc": "none", "mec": figures.TRUTH, "mew": 1.5, "ls": "none"}
    axes.plot(*full_batch.tolist(), "o", ms=16, label="one process, full batch", **circle)
    ends = torch.stack([*of_ranks, full_batch, torch.zeros(2)])
    (left, bottom), (right, top) = ends.amin(dim=0).tolist(), ends.amax(dim=0).tolist()
    axes.set(xlim=(left - 0.5, right + 0.6), ylim=(bottom - 0.5, top + 0.4))
    axes.set(xlabel="gradient of weight 0", ylabel="gradient of weight 1")
    axes.legend(loc="upper right")
    return figure


def _arrow(axes: plt.Axes, to: Tensor, color: str, width: float) -> None:
    style = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "color": color, "lw": width}
    axes.annotate("", to.tolist(), (0, 0), arrowprops=style)
