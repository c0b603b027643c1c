"""For accumulate_vs_ddp.ipynb: which processes run the two Trainers, on whose data."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.book import figures

_PROCESSES = 4
# The sample that DistributedSampler, shuffled with seed 42, gives each rank.
_GIVEN = (2, 3, 0, 1)
_VERSIONS = {  # by (first Trainer has a strategy, seed before the data)
    (True, False): "as-asked",
    (True, True): "seed-moved",
    (False, False): "strategy-removed",
    (False, True): "both-fixed",
}
_LEFT = {"data": 0.0, "first": 1.15, "second": 5.1}
_WIDTH = {"data": 0.95, "first": 2.1, "second": 1.25}


def two_trainers() -> Figure:
    """Four panels: strategy in or out × seed after or before.

    Columns of a panel, in the order of the script: the data, the first Trainer, the
    second one. Rows: processes. A process that is never started is dashed.
    """
    figure, axes = plt.subplots(2, 2, figsize=(9.2, 6.0))
    for row, first_ddp in enumerate((True, False)):
        for column, seed_first in enumerate((False, True)):
            _panel(axes[row][column], first_ddp, seed_first)
    for ax, title in zip(
        axes[0], ("data drawn before the seed", "seed set before the data"), strict=True
    ):
        ax.text(0, -1.75, title, fontsize=11, weight="bold")
    return figure


def _panel(ax: Axes, first_ddp: bool, seed_first: bool) -> None:
    alive = 1 if first_ddp else _PROCESSES
    for process in range(_PROCESSES):
        y = float(process)
        if process >= alive:
            _box(ax, "second", y, "no process", None)
            continue
        data = 0 if seed_first else process
        name = "ABCD"[data]
        _box(ax, "data", y, f"data {name}", data)
        _box(ax, "first", y, " ".join(f"{name}{i}" for i in range(_PROCESSES)), data)
        _box(ax, "second", y, f"{name}{_GIVEN[process]}", data)
        label = f"LOCAL_RANK={process}" if process else "started by you"
        ax.text(-0.12, y + 0.35, label, ha="right", va="center", fontsize=8)
        ax.annotate(
            "", (5.06, y + 0.35), (3.29, y + 0.35), arrowprops={"arrowstyle": "->"}
        )
    color = figures.WRONG if first_ddp else figures.TRUTH
    note = "leaves\nLOCAL_RANK=0" if first_ddp else "starts\nprocesses 1–3"
    ax.text(4.17, 0.26, note, ha="center", va="bottom", fontsize=7.5, color=color)
    for key, heading in (("first", "first Trainer"), ("second", "second Trainer")):
        ax.text(_LEFT[key], -0.45, heading, fontsize=8.5)
    version = _VERSIONS[first_ddp, seed_first]
    strategy = 'strategy="ddp"' if first_ddp else "no strategy"
    ax.text(-1.65, -1.1, version, fontsize=9.5, weight="bold")
    ax.text(1.15, -1.1, f"first Trainer: {strategy}", fontsize=9.5, style="italic")
    ax.set(xlim=(-1.7, 6.35), ylim=(4.0, -1.9))
    ax.axis("off")


def _box(ax: Axes, column: str, y: float, text: str, data: int | None) -> None:
    face = "none" if data is None else figures.RANKS[data] + "55"
    edge = "#999999" if data is None else figures.TRUTH
    style = "--" if data is None else "-"
    ax.add_patch(
        plt.Rectangle(
            (_LEFT[column], y),
            _WIDTH[column],
            0.7,
            facecolor=face,
            edgecolor=edge,
            ls=style,
        )
    )
    middle = _LEFT[column] + _WIDTH[column] / 2
    small = 7 if data is None else 9
    ax.text(
        middle, y + 0.35, text, ha="center", va="center", fontsize=small, color=edge
    )
