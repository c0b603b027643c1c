"""For in_the_loss.ipynb: losses under DDP against the loss that was meant, tables of
their best factors and their values, a tiny CLIP, and two figures of gathers.
"""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from labkit.book import figures, table
from labkit.launch import run_ranks
from labkit.testing import (
    gradient_of,
    gradients,
    rows_of_ranks,
    try_variants,
    under_ddp,
)
from labkit.testing.compare import Verdicts
from labkit.testing.variants import LossOnRows, Variant


class TwoTowers(nn.Module):
    """A tiny CLIP: two linear encoders onto the unit sphere, and a learned temperature.

    The temperature is the only parameter without dimensions, which is how its gradient
    is told from the encoders' gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.image, self.caption = nn.Linear(5, 6), nn.Linear(4, 6)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(
        self, images: Tensor, captions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(n, 5) and (n, 4) → (n, 6), (n, 6), and the factor of their scores."""
        image = F.normalize(self.image(images), dim=1)
        caption = F.normalize(self.caption(captions), dim=1)
        return image, caption, self.temperature


def judge(
    model: nn.Module,
    losses: Mapping[str, LossOnRows],
    meant: LossOnRows,
    counts: Sequence[int],
    only: Callable[[Tensor], bool] | None = None,
) -> Verdicts:
    """Back-propagate each of `losses` under DDP, and compare with the gradient of
    `meant`.

    A loss is a function of the model and of the rows that a rank owns; rank r owns the
    next `counts[r]`. For `meant` it is the bare model in one process, and all rows.
    `only` selects the gradients to compare; by default all are.
    """

    def selected(found: list[Tensor]) -> list[Tensor]:
        return [gradient for gradient in found if only is None or only(gradient)]

    def variant_of(loss: LossOnRows) -> Variant:
        run = under_ddp(loss)

        def variant(module: nn.Module, rows: slice) -> list[Tensor]:
            run(module, rows)
            return selected(gradients(module))

        return variant

    variants = {name: variant_of(loss) for name, loss in losses.items()}
    true = gradient_of(model, lambda alone: meant(alone, slice(None)))
    return try_variants(model, variants, selected(true), counts)


def best_factors(judged: Verdicts) -> str:
    """Per wrong verdict, the factor that repairs most, and the error that it leaves.

    The error is relative to the wanted gradient.
    """
    rows = []
    for verdict in judged:
        ratio, cosine = verdict.comparison
        error = max(0, 1 - cosine**2) ** 0.5
        if verdict.kind != "right":
            rows.append([verdict.variant, cosine / ratio, f"{100 * error:.0f} %"])
    return table(["wrong", "best factor", "error left"], rows, digits=2)


def values_on_rank_0(
    model: nn.Module,
    losses: Mapping[str, LossOnRows],
    counts: Sequence[int],
    meant: LossOnRows,
) -> str:
    """A table of the losses' values on rank 0, and of `meant` in one process."""

    def values(rank: int) -> list[list]:
        rows = rows_of_ranks(counts)[rank]
        return [[name, loss(model, rows).item()] for name, loss in losses.items()]

    alone = ["one process", meant(model, slice(None)).item()]
    return table(["", "value of the loss"], [alone, *run_ranks(values, len(counts))[0]])


_CENTERED = {"ha": "center", "va": "center"}


def gather_backward(world_size: int = 4) -> Figure:
    """The gradients that reach rank 0's tensor through a gather with gradient, or not.

    Every rank's loss uses every rank's tensor. Panel one draws a plain all-gather with
    the own slice reinserted, panel two an all-gather with gradient. At most four ranks.
    """
    figures.use()
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 2.7), sharey=True)
    titles = ("plain, own slice reinserted", "all-gather with gradient")
    for axes, title, sources in zip(panels, titles, (1, world_size), strict=True):
        for rank in range(world_size):
            color = figures.RANKS[rank]
            for height, symbol in ((1, "L"), (0, "x")):
                style = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": color}
                label = f"${symbol}_{rank}$"
                axes.text(rank, height, label, bbox=style | {"lw": 1.6}, **_CENTERED)
            if rank < sources:
                arrow = {"arrowstyle": "-|>", "color": color, "lw": 1.8, "shrinkA": 12}
                axes.annotate("", (0, 0), (rank, 1), arrowprops=arrow | {"shrinkB": 14})
                on_line = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"}
                place = (0.6 * rank, 0.6)
                axes.text(*place, "1", color=color, bbox=on_line, **_CENTERED)
        share = "1" if sources == world_size else f"1/{world_size}"
        text = f"gradient of $x_0$: {sources}; after DDP: {share}"
        axes.text((world_size - 1) / 2, -0.62, text, fontsize=10, **_CENTERED)
        axes.set_title(title, fontsize=11)
        axes.set(xlim=(-0.5, world_size - 0.5), ylim=(-0.8, 1.3))
        axes.set_axis_off()
    return figure


def own_rows_of_scores(rank: int = 1, world_size: int = 4, per_rank: int = 2) -> Figure:
    """All scores: one rank's rows filled, and the column of one of its captions
    framed.
    """
    n = per_rank * world_size
    figure, axes = plt.subplots(figsize=(4.6, 3.6))
    for row in range(n):
        for column in range(n):
            own = row // per_rank == rank
            fill = to_rgba(figures.RANKS[rank], 0.35) if own else "white"
            cell = Rectangle((column, row), 1, 1, fc=fill, ec="#bbbbbb", lw=0.6)
            axes.add_patch(cell)
            if row == column:
                axes.text(column + 0.5, row + 0.5, "✓", fontsize=9, **_CENTERED)
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
