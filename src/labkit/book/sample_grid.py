"""Which rank holds which sample in which step, as a grid of numbered cells."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from labkit.book import figures


def sample_grid(panels: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """One panel per way to deal samples: a row per rank, a column per step.

    A sample that occurs twice in a panel is orange where it occurs again (step by step, and within
    a step by rank). A step in which a rank has no sample is an empty gray cell.

    Args:
        panels: title → for each rank its samples in the order of its steps.
    """
    down = math.ceil(len(panels) / 2)
    figure, grid = plt.subplots(down, 2, figsize=(6.4, 1.9 * down), squeeze=False)
    for axes, (title, of_ranks) in zip(grid.flat, panels.items(), strict=False):
        steps = max(map(len, of_ranks))
        seen: Counter[int] = Counter()
        for step in range(steps):
            for rank, samples in enumerate(of_ranks):
                here = samples[step] if step < len(samples) else None
                color = "#dddddd" if here is None else "white"
                if here is not None and seen[here]:
                    color = figures.RANKS[1]
                axes.add_patch(Rectangle((step, rank), 1, 1, facecolor=color, edgecolor="#666666"))
                if here is not None:
                    seen[here] += 1
                    axes.text(step + 0.5, rank + 0.5, str(here), ha="center", va="center")
        axes.set(xlim=(0, steps), ylim=(len(of_ranks), 0))
        axes.set_xticks([i + 0.5 for i in range(steps)], [f"step {i + 1}" for i in range(steps)])
        ranks = range(len(of_ranks))
        axes.set_yticks([r + 0.5 for r in ranks], [f"rank {r}" for r in ranks])
        axes.tick_params(length=0, labelsize=8)
        axes.set_title(title, fontsize=9)
        for side in axes.spines.values():
            side.set_visible(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.axis("off")
    return figure
