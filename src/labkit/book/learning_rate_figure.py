"""Which learning rate a data-parallel run needs: one picture instead of a table of eight rows."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.book import figures
from labkit.scenarios.sum_and_average import (
    BATCH,
    COMBINATIONS,
    LEARNING_RATE,
    LOSSES,
    combined_factor,
    matching_lr,
)

_NAMES = {"mean": "mean over its own\nsamples", "sum": "sum over its own\nsamples"}
_HEADINGS = {"average": "gradients averaged\n(DDP)", "sum": "gradients summed\n(comm hook)"}


def learning_rates(world_size: int = 2) -> Figure:
    """A panel per number of samples per step: one process's batch, and `world_size` times it."""
    figure, axes = plt.subplots(1, 2, figsize=(8.8, 3.4), sharey=True)
    titles = (
        f"{BATCH} samples per step in all, {BATCH // world_size} per rank",
        f"{BATCH * world_size} in all, {BATCH} per rank",
    )
    for ax, batch, title in zip(axes, (BATCH, BATCH * world_size), titles, strict=True):
        _panel(ax, batch, world_size)
        ax.set_title(title, fontsize=10.5)
    axes[0].set_ylabel("loss of a rank")
    return figure


def _panel(ax: Axes, batch: int, world_size: int) -> None:
    for row, loss in enumerate(LOSSES):
        for column, combine in enumerate(COMBINATIONS):
            lr = matching_lr(loss, combine, world_size, batch)
            factor = combined_factor(loss, combine, world_size)
            approximate = batch != BATCH
            kept = lr == LEARNING_RATE
            color = figures.RANKS[2] if kept else figures.RANKS[1]
            ax.add_patch(plt.Rectangle((column + 0.03, row + 0.03), 0.94, 0.94, color=color + "55"))
            text = f"{'≈ ' if approximate else ''}{lr:g}"
            ax.text(column + 0.5, row + 0.42, text, ha="center", va="center", fontsize=15)
            gradient = f"gradient × {factor:g}"
            ax.text(column + 0.5, row + 0.78, gradient, ha="center", va="center", fontsize=8.5)
    ax.set(xlim=(0, 2), ylim=(2, 0), xticks=(0.5, 1.5), yticks=(0.5, 1.5))
    ax.set_xticklabels([_HEADINGS[c] for c in COMBINATIONS], fontsize=9)
    ax.set_yticklabels([_NAMES[loss] for loss in LOSSES], fontsize=9)
    ax.tick_params(length=0)
    ax.set_frame_on(False)
