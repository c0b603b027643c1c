"""A picture of one optimizer step: ranks × micro-batches, and what each token is divided by."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from labkit.book.figures import RANKS, TRUTH, WRONG

Grid = Sequence[Sequence[float]]


def token_weights(counts: Sequence[Sequence[int]], denominators: Grid) -> list[list[float]]:
    """How much a token of each cell weighs in DDP's average, where 1 is right.

    Both arguments are `[rank][micro-batch]`: how many tokens a micro-batch has, and what its summed
    loss is divided by. A token then weighs 1 / (W · denominator) after DDP's division by the number
    of ranks W, and should weigh 1/N, with N the tokens of all cells.
    """
    items, world_size = sum(map(sum, counts)), len(counts)
    return [[items / (world_size * d) for d in of_rank] for of_rank in denominators]


def draw_batch_grid(counts: Sequence[Sequence[int]], ways: Mapping[str, Grid]) -> Figure:
    """One panel for each way: a cell for each micro-batch, with its tokens and its denominator.

    Cells in which a token weighs what it should are gray; the others carry the weight in color.
    """
    figure, _ = plt.subplots(
        len(ways), 1, figsize=(6.4, 0.35 + 1.55 * len(ways)), facecolor="white"
    )
    for ax, (name, denominators) in zip(figure.axes, ways.items(), strict=True):
        weights = token_weights(counts, denominators)
        for rank, of_rank in enumerate(counts):
            for part, tokens in enumerate(of_rank):
                weight = weights[rank][part]
                right = abs(weight - 1) < 1e-9
                color = "#E3E6E9" if right else (WRONG if weight > 1 else RANKS[0])
                ax.barh(rank, 0.97, left=part, height=0.9, color=color, alpha=1 if right else 0.3)
                unit = "token" if tokens == 1 else "tokens"
                divided = f"{tokens} {unit} ÷ {denominators[rank][part]:g}"
                ax.text(part + 0.485, rank - 0.17, divided, ha="center", va="center", fontsize=10)
                text = f"weight {weight:.2f}" if right else f"weight {weight:.2f}, not 1"
                ax.text(
                    part + 0.485,
                    rank + 0.22,
                    text,
                    ha="center",
                    va="center",
                    fontsize=9,
                    color=TRUTH,
                )
        ax.set_title(name, fontsize=11)
        ax.set_yticks(range(len(counts)), [f"rank {rank}" for rank in range(len(counts))])
        ax.set_xticks([])
        ax.set(xlim=(0, max(map(len, counts))), ylim=(len(counts) - 0.5, -0.5))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return figure
