"""Which loss each rank back-propagates: the one equation of data-parallel training.

**The rule.** DDP delivers the gradient of (1/W) Σ L_r, as long as every path between ranks carries
gradient. So choose local losses with Σ L_r = W · L, where L is the loss you mean. The cases:

- A rank divides its own terms by the global count N: multiply its loss by W.
- A rank divides its own terms by its own count, and the counts are equal: multiply by 1.
- Each rank computes the whole loss through a gather that carries gradient: multiply by 1.
- A rank computes only its own rows of that loss, and divides by N: multiply by W.
- A rank divides its own rows of that loss by its own count, and the counts are equal: multiply
  by 1.
- The whole loss through a plain gather, which carries no gradient, with the rank's own slice
  reinserted: multiply by W, except for the loss's own parameters.
- Only the rank's own rows of that loss, through a plain gather: no factor is right.

The functions of this file are for the first case. N counts every item (sample or token) of one
optimizer step, on all ranks and in all micro-batches. The loss you mean is Σ ℓ_i / N, so

    L_r = (W / N) · Σ ℓ_i    over the items i of rank r

A mean over the rank's own items is a different loss if the counts differ, as they do with
sentences: an item then weighs more on a rank that has few of them. No learning rate repairs that.

`global_mean` applies the equation to one forward and backward. `accumulation_windows` and
`loss_scale` apply it to several micro-batches. `token_cross_entropy` turns logits into a sum and
a count.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from miniddp.comm import this_group

Batch = TypeVar("Batch")


def global_mean(
    loss_sum: Tensor, count: float | Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The mean loss over the items of all ranks: back-propagate it under DDP, and log it.

    The value is Σ loss_sum / Σ count over the ranks, bitwise equal on each. The gradient is W/N
    times the gradient of this rank's `loss_sum`, which DDP averages into the gradient of the value.

    Every rank of the group must call it. A rank with a count of 0 passes a zero that depends on
    the parameters, such as the sum of no losses, because DDP waits for that rank's backward, too.
    For gradient accumulation, see `loss_scale`.

    Args:
        loss_sum: one element: the *sum* of this rank's losses. An integer sum (correct answers, for
            an accuracy) gives a mean of the default dtype.
        count: the number of items summed, or the sum of their weights; not differentiated.
        group: the process group; the default one when None.

    Raises ValueError on every rank if a rank has a negative count, if all counts are 0, or if
    `loss_sum` requires a gradient on some ranks only. Raises it on this rank alone if `loss_sum`
    or `count` has more than one element.

    Costs one all-reduce of 32 bytes: four float64, so counts are exact up to 2⁵³. On a GPU the
    host waits for the loss.
    """
    if loss_sum.numel() != 1:
        shape = tuple(loss_sum.shape)
        raise ValueError(f"loss_sum has shape {shape}: add the losses up, reduction='sum'")
    if not loss_sum.is_floating_point():
        loss_sum = loss_sum.to(torch.get_default_dtype())
    total, total_count = _over_all_ranks(loss_sum, count, loss_sum.device, group)
    share = loss_sum * (dist.get_world_size(group) / float(total_count))
    value = (total / total_count).to(loss_sum.dtype).reshape(share.shape)
    return _WithGradientOf.apply(share, value)


class _WithGradientOf(torch.autograd.Function):
    """Returns `value` and passes its gradient on to `share`, even if `share` is infinite."""

    @staticmethod
    def forward(share: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Nothing is kept for backward."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def loss_scale(
    count: float | Tensor,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> float:
    """W / N, the factor for each rank's loss sums in a window of several micro-batches.

    N must count the whole window before its first backward, which already divides by it. Dividing
    each micro-batch by its own count and by the number of micro-batches is a mean of means: wrong
    for the same reason as across ranks.

        for window, count in accumulation_windows(loader, 4, count_tokens):
            scale = loss_scale(count)
            for i, batch in enumerate(window):
                with nullcontext() if i == len(window) - 1 else model.no_sync():
                    (loss_sum(model, batch) * scale).backward()

    Log `global_mean(sum of the window's loss sums, count)`. Windows may have different lengths on
    different ranks, because only the last backward of a window communicates.

    Args:
        count: the number of items in this rank's window.
        group: the process group; the default one when None.
        device: where to communicate: a GPU under NCCL (not yet run on one). By default the device
            of `count`, or the CPU if `count` is a number.

    Raises and costs the same as `global_mean`.
    """
    if device is None:
        device = count.device if isinstance(count, Tensor) else "cpu"
    nothing = torch.zeros((), device=device)
    _, total_count = _over_all_ranks(nothing, count, nothing.device, group)
    return dist.get_world_size(group) / float(total_count)


def accumulation_windows(
    batches: Iterable[Batch], size: int, count: Callable[[Batch], int]
) -> Iterator[tuple[list[Batch], int]]:
    """Cut `batches` into windows of `size` micro-batches; yield each with its number of items.

    The last window may be shorter. It needs no special care, because its count is smaller, too;
    a loss divided by `size` would be too small there. All batches of a window, but not their
    activations, are in memory at the same time.

    Raises ValueError if `size` is less than 1.
    """
    if size < 1:
        raise ValueError(f"a window of {size} micro-batches: size must be at least 1")
    batches = iter(batches)
    while window := list(islice(batches, size)):
        yield window, sum(map(count, window))


def token_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over tokens, and the number of tokens; pass both to `global_mean`.

    Args:
        logits: (…, V), computed in float32 or higher. Not shifted here: `logits[i]` predicts
            `targets[i]`.
        targets: (…), integers; those equal to `ignore_index` (padding) are not counted.
        weights: (…), one per token; the sum is then Σwℓ and the count Σw.
        ignore_index: as in `torch.nn.functional.cross_entropy`.

    Returns the sum and the count, both 0-d. If every target is ignored, the sum is a zero that can
    be back-propagated, which a rank without tokens needs.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.flatten(),
        reduction="none",
        ignore_index=ignore_index,
    )
    counted = targets.flatten() != ignore_index
    if weights is None:
        return losses.sum(), counted.sum()
    if weights.is_floating_point():  # a sum in half precision would be rounded, or infinite
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    weights = weights.flatten() * counted
    return (losses * weights).sum(), weights.sum()


def _over_all_ranks(
    loss_sum: Tensor, count: float | Tensor, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Sum and count over the ranks, in float64. Invalid input on one rank raises on every rank."""
    this_group(group)
    own = torch.as_tensor(count, dtype=torch.float64, device=device).detach()
    if own.numel() != 1:
        raise ValueError(f"count has shape {tuple(own.shape)}: pass one number, such as mask.sum()")
    # A rank that raised at once on its own bad input would leave the others waiting for it, so the
    # ranks exchange whether theirs is bad.
    bad, attached = not 0 <= own < math.inf, loss_sum.requires_grad
    numbers = [loss_sum.detach().reshape(()), own.reshape(()), *own.new_tensor([bad, attached])]
    totals = torch.stack([number.double() for number in numbers])
    dist.all_reduce(totals, group=group)
    total, total_count, bad_ranks, attached_ranks = totals.unbind()
    world_size = dist.get_world_size(group)
    if bad_ranks:
        raise ValueError(
            f"a negative or infinite count (or NaN) on {int(bad_ranks)} of {world_size} ranks; "
            f"this one's is {float(own):g}. Pass the number of items, or the sum of their weights"
        )
    if not total_count:
        raise ValueError(
            "the count is 0 on every rank, so there is no mean: skip this step on all ranks, or "
            "find out why every item is masked or ignored"
        )
    if 0 < attached_ranks < world_size:
        raise ValueError(
            f"loss_sum requires a gradient on {int(attached_ranks)} of {world_size} ranks only "
            f"(this one: {attached}), and DDP would wait for the others in backward: on a rank "
            "without items, pass a zero that depends on the parameters, such as 0 * output.sum()"
        )
    return total, total_count
