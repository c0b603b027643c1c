"""What happens to a gradient with and without a call of the wrapper."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.book import figures

_X = (0.0, 2.35, 4.55, 6.55, 8.55)
_WIDTH = 1.75


def reducer_path() -> Figure:
    """Two rows of steps: the loss through the wrapper, and the loss on `.module`."""
    figure, ax = plt.subplots(figsize=(9.2, 2.9))
    _row(
        ax,
        0.0,
        ["wrapper(x)", "reducer:\nprepared", "backward", "hook: copy\ninto bucket", "all-reduce"],
        ["prepares", "", "one call per\ngradient", "bucket full"],
        figures.RANKS[2],
    )
    _row(
        ax,
        1.75,
        ["wrapper.module(x)", "reducer:\nunprepared", "backward", "hook:\nreturns", "nothing"],
        [None, "", "one call per\ngradient", None],
        figures.WRONG,
    )
    ax.set(xlim=(-0.1, _X[-1] + _WIDTH + 0.1), ylim=(2.7, -0.75))
    ax.axis("off")
    return figure


def _row(ax: Axes, y: float, steps: list[str], arrows: list[str | None], color: str) -> None:
    for x, text in zip(_X, steps, strict=True):
        ax.add_patch(plt.Rectangle((x, y), _WIDTH, 0.8, facecolor=color + "33", edgecolor=color))
        ax.text(x + _WIDTH / 2, y + 0.4, text, ha="center", va="center", fontsize=9)
    for x, following, text in zip(_X, _X[1:], arrows, strict=False):
        if text is None:  # the step is not taken
            ax.text(
                (x + _WIDTH + following) / 2, y + 0.4, "×", ha="center", va="center", color=color
            )
            continue
        middle = (x + _WIDTH + following) / 2
        ax.annotate(
            "", (following, y + 0.4), (x + _WIDTH, y + 0.4), arrowprops={"arrowstyle": "->"}
        )
        ax.text(middle, y - 0.08, text, ha="center", va="bottom", fontsize=7.5)
