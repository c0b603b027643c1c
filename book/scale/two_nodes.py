"""For two_nodes.ipynb: the flat ring and the hierarchical all-reduce on two nodes."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from labkit.book.figures import RANKS, TRUTH, WRONG, use

_L = 4
_X = (0.0, 3.0)


def draw_flat_and_hierarchical() -> Figure:
    """Left: the flat ring; right: the hierarchical all-reduce. n is the gradient."""
    use()
    figure, (flat, levels) = plt.subplots(1, 2, figsize=(8.6, 4.0), facecolor="white")
    # The ring goes down node 0 and up node 1, so that its crossings are at the ends.
    down = {rank: (_X[0], -float(rank)) for rank in range(_L)}
    up = {_L + rank: (_X[1], -float(_L - 1 - rank)) for rank in range(_L)}
    place = {**down, **up}
    _nodes(flat, "flat ring: one link carries 1.75 n", place)
    for rank in range(2 * _L):
        peer = (rank + 1) % (2 * _L)
        crosses = (rank < _L) != (peer < _L)
        _arrow(flat, place[rank], place[peer], crosses, "-|>")
        if crosses:
            x, y = 1.5, place[rank][1]
            flat.text(x, y + 0.12, "1.75 n", ha="center", va="bottom", color=WRONG)

    place = {**down, **{_L + rank: (_X[1], -float(rank)) for rank in range(_L)}}
    _nodes(levels, "hierarchical: four links carry n/4 each", place)
    for rank in range(_L):
        _arrow(levels, place[rank], place[rank + _L], True, "<|-|>")
        y = place[rank][1]
        levels.text(
            1.5, y + 0.12, "2. all-reduce n/4", ha="center", color=WRONG, fontsize=9
        )
        for first in (0, _L):
            if rank + 1 < _L:
                _arrow(
                    levels, place[first + rank], place[first + rank + 1], False, "<|-|>"
                )
    for x in _X:
        text = "1. reduce-scatter\n3. all-gather"
        levels.text(x, -_L + 0.18, text, ha="center", va="top", fontsize=9, color=TRUTH)
    return figure


def _nodes(axes: Axes, title: str, place: dict[int, tuple[float, float]]) -> None:
    for node, x in enumerate(_X):
        style = "round,pad=0,rounding_size=0.15"
        box = FancyBboxPatch(
            (x - 0.5, -_L + 0.5), 1, _L, boxstyle=style, fc="#F2F4F6", ec=TRUTH, lw=1
        )
        axes.add_patch(box)
        axes.text(x, 0.58, f"node {node}", ha="center", va="bottom", color=TRUTH)
    for rank, (x, y) in place.items():
        color, ink = (RANKS[0], "white") if rank < _L else (RANKS[1], TRUTH)
        axes.plot(x, y, "o", ms=24, color=color, zorder=3)
        axes.text(x, y, str(rank), ha="center", va="center", color=ink, zorder=4)
    axes.set_title(title, fontsize=11)
    axes.set(xlim=(-0.9, _X[1] + 0.9), ylim=(-_L - 0.5, 1.0))
    axes.set_axis_off()


def _arrow(
    axes: Axes,
    begin: tuple[float, float],
    end: tuple[float, float],
    crosses: bool,
    style: str,
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            begin,
            end,
            arrowstyle=style,
            mutation_scale=12,
            shrinkA=13,
            shrinkB=13,
            lw=2.2 if crosses else 1.4,
            color=WRONG if crosses else TRUTH,
        )
    )
