"""For mean_of_means.ipynb: weights, losses, and gradients of padded captions on ranks,
digits that have no padding, and a figure of what each token weighs.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from labkit.book.figures import RANKS, TRUTH, WRONG
from labkit.launch.ranks import run_ranks
from labkit.scenarios.padded_captioner import (
    PADDING,
    Captions,
    micro_batches,
    to_device,
)
from labkit.testing.compare import gradients

WAYS = ("mean of means", "own tokens", "N / W")

Counts = Sequence[Sequence[int]]


def denominators(way: str, counts: Counts) -> list[list[float]]:
    """What each micro-batch's summed loss is divided by, before DDP divides by the
    ranks.

    Args:
        way: "mean of means" takes the micro-batch's own tokens, times the number of
            micro-batches of the rank; "own tokens" all tokens of the rank; "N / W" all
            tokens of all ranks, over the number of ranks.
        counts: tokens, `[rank][micro-batch]`; the result has the same shape.
    """
    if way == "mean of means":
        return [[n * len(own) for n in own] for own in counts]
    if way == "own tokens":
        return [[sum(own)] * len(own) for own in counts]
    if way == "N / W":
        return [[sum(map(sum, counts)) / len(counts)] * len(own) for own in counts]
    raise ValueError(f"way must be one of {WAYS}, got {way!r}")


def cut(captions: Captions, ranks: int, parts: int) -> list[list[Captions]]:
    """Equal shares of a batch, `[rank][micro-batch]`; both numbers have to divide the
    batch.
    """
    shares = micro_batches(captions, len(captions.pixels) // ranks)
    return [micro_batches(share, len(share.pixels) // parts) for share in shares]


def summed_loss(model: nn.Module, captions: Captions) -> Tensor:
    """The cross-entropy of all tokens, summed, in float32; padding is not counted."""
    logits = model(captions.pixels, captions.tokens).flatten(0, 1)
    return F.cross_entropy(logits, captions.targets.flatten(), reduction="sum")


def gradients_on_ranks(
    model: nn.Module,
    shares: Sequence[Sequence[Captions]],
    divide_by: Sequence[Sequence[float]],
    wrap: Callable[[nn.Module], nn.Module],
) -> list[list[Tensor]]:
    """Each rank's gradient after one accumulated step under the wrapper `wrap`.

    `shares` and `divide_by` are `[rank][micro-batch]`: captions, and what their summed
    loss is divided by.
    """
    return run_ranks(_accumulate, len(shares), model, shares, divide_by, wrap)


def steps_on_ranks(
    step: Callable[[nn.Module, list[Captions]], Tensor],
    model: nn.Module,
    epoch: Sequence[Sequence[Captions]],
    window: int,
    wrap: Callable[[nn.Module], nn.Module],
) -> list[list[tuple[float, list[Tensor]]]]:
    """`[rank][step]`: what `step(wrapped model, micro-batches)` returned and left as
    gradient.

    `epoch` is `[rank][micro-batch]`; each step takes the next `window` of them, the
    last one what is left. The weights are not changed.
    """
    return run_ranks(_steps, len(epoch), step, model, epoch, window, wrap)


def losses_per_caption(model: nn.Module, captions: Captions) -> tuple[Tensor, Tensor]:
    """Each caption's summed loss and number of tokens, both (B,) in float64."""
    with torch.no_grad():
        logits = model(captions.pixels, captions.tokens)
    losses = F.cross_entropy(
        logits.flatten(0, 1), captions.targets.flatten(), reduction="none"
    )
    counted = captions.targets != PADDING
    return losses.view(counted.shape).double().sum(dim=1), counted.sum(dim=1).double()


def mean_of_means(sums: Tensor, counts: Tensor, size: int) -> float:
    """The mean of the mean losses of micro-batches of `size` captions; `size` divides
    the batch.
    """
    means = sums.view(-1, size).sum(dim=1) / counts.view(-1, size).sum(dim=1)
    return means.mean().item()


def true_mean(sums: Tensor, counts: Tensor) -> float:
    """The mean loss over all tokens."""
    return (sums.sum() / counts.sum()).item()


def excess(sums: Tensor, counts: Tensor, steps: Sequence[int], orders: int) -> Tensor:
    """Mean of means − true mean, (orders, steps): random orders, cut in `steps`."""
    generator = torch.Generator().manual_seed(0)
    true, rows = true_mean(sums, counts), []
    for _ in range(orders):
        order = torch.randperm(len(sums), generator=generator)
        sizes = [len(sums) // k for k in steps]
        rows.append(
            [mean_of_means(sums[order], counts[order], size) - true for size in sizes]
        )
    return torch.tensor(rows, dtype=torch.float64)


def _accumulate(
    rank: int,
    device: torch.device,
    model: nn.Module,
    shares: Sequence[Sequence[Captions]],
    divide_by: Sequence[Sequence[float]],
    wrap: Callable[[nn.Module], Any],
) -> list[Tensor]:
    replica = wrap(copy.deepcopy(model).to(device))
    parts = list(zip(shares[rank], divide_by[rank], strict=True))
    for i, (captions, denominator) in enumerate(parts):
        with nullcontext() if i == len(parts) - 1 else replica.no_sync():
            (summed_loss(replica, to_device(captions, device)) / denominator).backward()
    return gradients(replica)


def _steps(
    rank: int,
    device: torch.device,
    step: Callable[[nn.Module, list[Captions]], Tensor],
    model: nn.Module,
    epoch: Sequence[Sequence[Captions]],
    window: int,
    wrap: Callable[[nn.Module], Any],
) -> list[tuple[float, list[Tensor]]]:
    replica = wrap(copy.deepcopy(model).to(device))
    mine = [to_device(captions, device) for captions in epoch[rank]]
    taken = []
    for first in range(0, len(mine), window):
        replica.zero_grad()
        logged = step(replica, mine[first : first + window])
        assert logged is not None, "the step returns no loss"
        taken.append((logged.item(), gradients(replica)))
    return taken


HEIGHT, WIDTH = 9, 5
# The seven bars as slices of rows and columns, and which of them each digit lights.
_BARS = {
    "top": (slice(0, 1), slice(0, 5)),
    "upper left": (slice(0, 5), slice(0, 1)),
    "upper right": (slice(0, 5), slice(4, 5)),
    "middle": (slice(4, 5), slice(0, 5)),
    "lower left": (slice(4, 9), slice(0, 1)),
    "lower right": (slice(4, 9), slice(4, 5)),
    "bottom": (slice(8, 9), slice(0, 5)),
}
_DARK = [
    {"middle"},
    {"top", "upper left", "middle", "lower left", "bottom"},
    {"upper left", "lower right"},
    {"upper left", "lower left"},
    {"top", "lower left", "bottom"},
    {"upper right", "lower left"},
    {"upper right"},
    {"upper left", "middle", "lower left", "bottom"},
    set(),
    {"lower left"},
]


def draw_digits(number: int, seed: int, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """`number` images, float32 (number, 9, 5), and their labels, int64 (number,).

    Segments are 1 and the rest is 0, plus Gaussian noise of standard deviation `noise`.
    """
    shapes = torch.zeros(10, HEIGHT, WIDTH)
    for shape, dark in zip(shapes, _DARK, strict=True):
        for name, (rows, columns) in _BARS.items():
            if name not in dark:
                shape[rows, columns] = 1
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(10, (number,), generator=generator)
    blur = torch.randn(number, HEIGHT, WIDTH, generator=generator)
    return shapes[digits] + noise * blur, digits


Grid = Sequence[Sequence[float]]


def token_weights(counts: Counts, denominators: Grid) -> list[list[float]]:
    """How much a token of each cell weighs in DDP's average, where 1 is right.

    Both arguments are `[rank][micro-batch]`: how many tokens a micro-batch has, and
    what its summed loss is divided by. A token then weighs 1 / (W · denominator) after
    DDP's division by the number of ranks W, and should weigh 1/N, with N the tokens of
    all cells.
    """
    items, world_size = sum(map(sum, counts)), len(counts)
    return [[items / (world_size * d) for d in of_rank] for of_rank in denominators]


def draw_batch_grid(counts: Counts, ways: Mapping[str, Grid]) -> Figure:
    """A panel per way: a cell per micro-batch, with its tokens and its denominator.

    Cells in which a token weighs what it should are gray; the others carry the weight
    in color.
    """
    size = (6.4, 0.35 + 1.55 * len(ways))
    figure, _ = plt.subplots(len(ways), 1, figsize=size, facecolor="white")
    for ax, (name, divided_by) in zip(figure.axes, ways.items(), strict=True):
        weights = token_weights(counts, divided_by)
        for rank, of_rank in enumerate(counts):
            for part, tokens in enumerate(of_rank):
                unit = "token" if tokens == 1 else "tokens"
                divided = f"{tokens} {unit} ÷ {divided_by[rank][part]:g}"
                _cell(ax, rank, part, divided, weights[rank][part])
        ax.set_title(name, fontsize=11)
        ranks = range(len(counts))
        ax.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        ax.set_xticks([])
        ax.set(xlim=(0, max(map(len, counts))), ylim=(len(counts) - 0.5, -0.5))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return figure


def _cell(ax: Axes, rank: int, part: int, divided: str, weight: float) -> None:
    right = abs(weight - 1) < 1e-9
    color = "#E3E6E9" if right else (WRONG if weight > 1 else RANKS[0])
    alpha = 1 if right else 0.3
    ax.barh(rank, 0.97, left=part, height=0.9, color=color, alpha=alpha)
    centered = {"ha": "center", "va": "center"}
    ax.text(part + 0.485, rank - 0.17, divided, fontsize=10, **centered)
    text = f"weight {weight:.2f}" if right else f"weight {weight:.2f}, not 1"
    ax.text(part + 0.485, rank + 0.22, text, fontsize=9, color=TRUTH, **centered)
