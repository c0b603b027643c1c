"""Two figures on gathered features: what backward brings back; which scores a rank computes."""

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from labkit.book import figures


def gather_backward(world_size: int = 4) -> Figure:
    """The gradients that reach rank 0's tensor, with and without gradient through the gather.

    Every rank's loss uses every rank's tensor. Panel one draws a plain all-gather with the own
    slice reinserted, panel two an all-gather with gradient. At most four ranks.
    """
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 2.7), sharey=True)
    titles = ("plain, own slice reinserted", "all-gather with gradient")
    for axes, title, sources in zip(panels, titles, (1, world_size), strict=True):
        for rank in range(world_size):
            color = figures.RANKS[rank]
            for height, symbol in ((1, "L"), (0, "x")):
                style = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": color, "lw": 1.6}
                label = f"${symbol}_{rank}$"
                axes.text(rank, height, label, ha="center", va="center", bbox=style)
            if rank < sources:
                arrow = {"arrowstyle": "-|>", "color": color, "lw": 1.8, "shrinkA": 12}
                axes.annotate("", (0, 0), (rank, 1), arrowprops=arrow | {"shrinkB": 14})
                on_line = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"}
                place = (0.6 * rank, 0.6)
                axes.text(*place, "1", color=color, ha="center", va="center", bbox=on_line)
        share = "1" if sources == world_size else f"1/{world_size}"
        axes.text(
            (world_size - 1) / 2,
            -0.62,
            f"gradient of $x_0$: {sources}; after DDP: {share}",
            ha="center",
            va="center",
            fontsize=10,
        )
        axes.set_title(title, fontsize=11)
        axes.set(xlim=(-0.5, world_size - 0.5), ylim=(-0.8, 1.3))
        axes.set_axis_off()
    return figure


def own_rows_of_scores(rank: int = 1, world_size: int = 4, per_rank: int = 2) -> Figure:
    """The table of all scores: one rank's rows filled, and one of its captions' column framed."""
    n = per_rank * world_size
    figure, axes = plt.subplots(figsize=(4.6, 3.6))
    for row in range(n):
        for column in range(n):
            own = row // per_rank == rank
            fill = to_rgba(figures.RANKS[rank], 0.35) if own else "white"
            axes.add_patch(Rectangle((column, row), 1, 1, fc=fill, ec="#bbbbbb", lw=0.6))
            if row == column:
                axes.text(column + 0.5, row + 0.5, "✓", ha="center", va="center", fontsize=9)
    caption = rank * per_rank
    axes.add_patch(Rectangle((caption, 0), 1, n, fc="none", ec=figures.WRONG, lw=2.2))
    axes.set(xlim=(-0.1, n + 0.1), ylim=(n + 0.1, -0.1), aspect="equal")
    centers = [per_rank * (r + 0.5) for r in range(world_size)]
    ranks = [f"rank {r}" for r in range(world_size)]
    axes.set_xticks(centers, ranks, fontsize=9)
    axes.set_yticks(centers, ranks, fontsize=9)
    axes.set(xlabel="captions", ylabel="images")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure
