"""How all-reduces pair up when one rank makes fewer calls: by position, not by name."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from labkit.book import figures

_HEAD_COLORS = {"a": figures.RANKS[0], "b": figures.RANKS[1]}


def pairing(calls: Sequence[Sequence[str]]) -> Figure:
    """Draw each rank's calls, in order, and join the n-th of rank 0 with the n-th of rank 1.

    calls: for each of two ranks, names such as "a1": the parameter and the step it belongs to.
    """
    figure, ax = plt.subplots(figsize=(7.6, 2.4))
    for rank, names in enumerate(calls):
        ax.text(-0.7, rank * 1.4 + 0.3, f"rank {rank}", ha="right", va="center")
        for position, name in enumerate(names):
            color = _HEAD_COLORS[name[0]]
            ax.add_patch(
                plt.Rectangle(
                    (position - 0.38, rank * 1.4),
                    0.76,
                    0.6,
                    facecolor=color + "55",
                    edgecolor=color,
                )
            )
            ax.text(position, rank * 1.4 + 0.3, name, ha="center", va="center")
    paired = min(map(len, calls))
    for position in range(paired):
        equal = calls[0][position] == calls[1][position]
        color = figures.TRUTH if equal else figures.WRONG
        ax.plot([position] * 2, [0.6, 1.4], color=color, lw=2)
    for position in range(paired, max(map(len, calls))):
        label = "waits" if position == paired else "not reached"
        ax.text(position, 0.8, label, ha="center", va="top", color=figures.WRONG, fontsize=9)
    ax.set(xlim=(-1.6, max(map(len, calls)) - 0.4), ylim=(2.2, -0.2))
    ax.axis("off")
    return figure
