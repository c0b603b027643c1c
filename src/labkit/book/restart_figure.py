"""Two nodes after a rank was killed: each agent's restart counter, and the store its ranks use."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from labkit.book.figures import RANKS, TRUTH, WRONG

_GRAY = "#F2F4F6"


def draw_restart_stores() -> Figure:
    """On the left torchrun's default; on the right TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.

    Rank 1, on node 1, was killed. Only its agent counts a restart; both restart their ranks.
    """
    figure, (shared, fresh) = plt.subplots(1, 2, figsize=(9.0, 4.1), facecolor="white")
    shared.set_title("default: one store for all attempts", fontsize=11)
    _agents(shared)
    _box(shared, 0.35, 0.0, 3.8, 1.15, _GRAY, TRUTH)
    _words(shared, 2.25, 0.84, "torchrun's store", TRUTH, 10)
    _words(shared, 2.25, 0.36, "rank 0's old address (dead)\nrank 1's old address (dead)", WRONG, 9)
    for x in (1.0, 3.5):
        _arrow(shared, (x, 2.05), (x, 1.2), WRONG)
    _words(shared, 2.25, 1.62, "connection\nrefused", WRONG, 9)

    fresh.set_title("variable set: a new store per attempt", fontsize=11)
    _agents(fresh)
    _box(fresh, 0.0, 0.0, 2.05, 1.15, "none", "#999999", "--")
    _words(fresh, 1.02, 0.57, "store of the first\nattempt, closed\nwith old rank 0", "#666666", 9)
    _box(fresh, 2.4, 0.0, 2.1, 1.15, _GRAY, TRUTH)
    _words(fresh, 3.45, 0.57, "store of the second\nattempt, opened\nby new rank 0", TRUTH, 9)
    for x, to in ((1.0, 2.75), (3.5, 3.5)):
        _arrow(fresh, (x, 2.05), (to, 1.2), RANKS[2])
    return figure


def _agents(axes: Axes) -> None:
    for node, left in enumerate((0.0, 2.5)):
        middle = left + 1.0
        _box(axes, left, 2.1, 2.0, 2.3, _GRAY, TRUTH)
        _words(axes, middle, 4.12, f"node {node}", TRUTH, 11)
        count = "restarts counted: 1" if node else "restarts counted: 0"
        _words(axes, middle, 3.55, f"agent\n{count}", TRUTH, 9)
        _box(axes, left + 0.15, 2.25, 1.7, 0.85, RANKS[node] + "55", TRUTH)
        what = "killed," if node else "stopped,"
        _words(axes, middle, 2.67, f"rank {node}: {what}\nstarted again", TRUTH, 9)
    axes.set(xlim=(-0.1, 4.6), ylim=(-0.1, 4.5))
    axes.set_axis_off()


def _box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    face: str,
    edge: str,
    line: str = "-",
) -> None:
    style = "round,pad=0,rounding_size=0.1"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, fc=face, ec=edge, ls=line, lw=1)
    )


def _words(axes: Axes, x: float, y: float, text: str, color: str, size: int) -> None:
    axes.text(x, y, text, ha="center", va="center", color=color, fontsize=size)


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.8})
