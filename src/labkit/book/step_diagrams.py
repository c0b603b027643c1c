"""Two diagrams of one training step: where each surprise sits, and what `no_sync` encloses."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from labkit.book import figures

_LOCAL, _AVERAGED = figures.RANKS[1], figures.RANKS[0]


def step_map(phases: Sequence[tuple[str, bool | None, Sequence[str]]]) -> Figure:
    """A training step from top to bottom, and beside each phase what may go wrong in it.

    Args:
        phases: name; whether the gradient is averaged in it (None: there is no gradient yet); and
            what may go wrong there.
    """
    lines = sum(max(1, len(surprises)) for _, _, surprises in phases)
    figure, axes = plt.subplots(figsize=(6.4, 0.5 + 0.3 * lines))
    top = 0.0
    for name, averaged, surprises in phases:
        height = max(1, len(surprises))
        color = {None: "#999999", False: _LOCAL, True: _AVERAGED}[averaged]
        axes.add_patch(Rectangle((0, top + 0.08), 2.7, height - 0.16, color=color, alpha=0.25))
        axes.text(0.12, top + height / 2, name, va="center", fontsize=10)
        for number, surprise in enumerate(surprises):
            axes.text(2.9, top + number + 0.5, surprise, va="center", fontsize=9)
        top += height
    axes.text(0, -0.35, "orange: this rank's own gradient", color="#9a6a00", fontsize=9)
    axes.text(2.9, -0.35, "blue: the average, equal on every rank", color=_AVERAGED, fontsize=9)
    axes.set(xlim=(-0.1, 8), ylim=(top + 0.1, -0.8))
    axes.axis("off")
    return figure


def no_sync_timeline(placements: Mapping[str, Sequence[tuple[bool, bool, bool]]]) -> Figure:
    """Per placement of `no_sync`, its micro-batches as forward and backward boxes in time.

    Args:
        placements: for each, one triple per micro-batch: whether its forward is under `no_sync`,
            whether its backward is, and whether an all-reduce was launched in that backward.
    """
    figure, _ = plt.subplots(
        len(placements), 1, figsize=(6.4, 0.95 * len(placements) + 0.3), sharex=True
    )
    for axes, (name, micro_batches) in zip(figure.axes, placements.items(), strict=True):
        for number, (forward, backward, launched) in enumerate(micro_batches):
            _micro_batch(axes, 4.0 * number, number + 1, forward, backward, launched)
        axes.set(xlim=(-0.1, 4.0 * len(micro_batches)), ylim=(-0.75, 1.5), yticks=[], xticks=[])
        axes.set_title(name, fontsize=10, pad=2)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.axes[-1].set_xlabel("time → (gray: inside no_sync; blue: an all-reduce)", fontsize=9)
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
            gray = Rectangle((left - 0.08, -0.12), width + 0.16, 1.24, color="#bbbbbb", lw=0)
            axes.add_patch(gray)
        axes.add_patch(Rectangle((left, 0), width, 1, facecolor="white", edgecolor="#444444"))
        axes.text(left + width / 2, 0.5, name, ha="center", va="center", fontsize=9)
    if launched:
        axes.add_patch(Rectangle((start + 2.3, -0.6), 1.2, 0.4, color=_AVERAGED))
