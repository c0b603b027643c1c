"""The mean of the means on padded captions: weights, losses, and gradients on several ranks."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.launch.ranks import run_ranks
from labkit.scenarios.padded_captioner import PADDING, Captions, summed_loss, to_device
from labkit.testing.compare import gradients

WAYS = ("mean of means", "own tokens", "N / W")

Counts = Sequence[Sequence[int]]


def denominators(way: str, counts: Counts) -> list[list[float]]:
    """What each micro-batch's summed loss is divided by, before DDP divides by the ranks.

    Args:
        way: "mean of means" takes the micro-batch's own tokens, times the number of micro-batches
            of the rank; "own tokens" all tokens of the rank; "N / W" all tokens of all ranks, over
            the number of ranks.
        counts: tokens, `[rank][micro-batch]`; the result has the same shape.
    """
    if way == "mean of means":
        return [[n * len(own) for n in own] for own in counts]
    if way == "own tokens":
        return [[sum(own)] * len(own) for own in counts]
    if way == "N / W":
        return [[sum(map(sum, counts)) / len(counts)] * len(own) for own in counts]
    raise ValueError(f"way must be one of {WAYS}, got {way!r}")


def gradients_on_ranks(
    model: nn.Module,
    shares: Sequence[Sequence[Captions]],
    divide_by: Sequence[Sequence[float]],
    wrap: Callable[[nn.Module], nn.Module],
) -> list[list[Tensor]]:
    """Each rank's gradient after one accumulated step under the wrapper `wrap`.

    `shares` and `divide_by` are `[rank][micro-batch]`: captions, and what their summed loss is
    divided by.
    """
    return run_ranks(_accumulate, len(shares), model, shares, divide_by, wrap)


def steps_on_ranks(
    step: Callable[[nn.Module, list[Captions]], Tensor],
    model: nn.Module,
    epoch: Sequence[Sequence[Captions]],
    window: int,
    wrap: Callable[[nn.Module], nn.Module],
) -> list[list[tuple[float, list[Tensor]]]]:
    """`[rank][step]`: what `step(wrapped model, micro-batches)` returned, and the gradient it left.

    `epoch` is `[rank][micro-batch]`; each step takes the next `window` of them, the last one what
    is left. The weights are not changed.
    """
    return run_ranks(_steps, len(epoch), step, model, epoch, window, wrap)


def losses_per_caption(model: nn.Module, captions: Captions) -> tuple[Tensor, Tensor]:
    """Each caption's summed loss and number of tokens, both (B,) in float64."""
    with torch.no_grad():
        logits = model(captions.pixels, captions.tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), captions.targets.flatten(), reduction="none")
    counted = captions.targets != PADDING
    return losses.view(counted.shape).double().sum(dim=1), counted.sum(dim=1).double()


def mean_of_means(sums: Tensor, counts: Tensor, size: int) -> float:
    """The mean of the mean losses of micro-batches of `size` captions; `size` divides the batch."""
    return (sums.view(-1, size).sum(dim=1) / counts.view(-1, size).sum(dim=1)).mean().item()


def true_mean(sums: Tensor, counts: Tensor) -> float:
    """The mean loss over all tokens."""
    return (sums.sum() / counts.sum()).item()


def excess(sums: Tensor, counts: Tensor, steps: Sequence[int], orders: int) -> Tensor:
    """Mean of means − true mean, (orders, steps): the captions in random orders, cut in `steps`."""
    generator = torch.Generator().manual_seed(0)
    true, rows = true_mean(sums, counts), []
    for _ in range(orders):
        order = torch.randperm(len(sums), generator=generator)
        sizes = [len(sums) // k for k in steps]
        rows.append([mean_of_means(sums[order], counts[order], size) - true for size in sizes])
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
        taken.append((logged.item(), gradients(replica)))
    return taken
