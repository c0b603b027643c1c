"""Which loss each rank has to back-propagate: the one equation of data-parallel training.

The gradient that is wanted is that of Σℓᵢ / N, where N counts every item (sample, or token) of one
optimizer step, over all ranks and all micro-batches. DDP delivers the average (1/W) Σᵣ ∇Lᵣ over
the W ranks. Put the two equal, and each rank has to back-propagate

    Lᵣ = (W / N) · Σ ℓᵢ    over the items i of rank r

The rule in words: **multiply by W if and only if the denominator is already global.** With `mean`
losses the denominator is the rank's own count nᵣ, and DDP's average weighs an item on a rank that
has few of them more than one elsewhere: right only where every nᵣ is the same. That fails as soon
as sentences differ in length, and no learning rate repairs it.

`global_mean` is the equation for one forward and backward; `accumulation_windows` and `loss_scale`
are the same for several micro-batches; `token_cross_entropy` makes a sum and a count of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from miniddp.replicas import size_of_group

Batch = TypeVar("Batch")


def global_mean(
    loss_sum: Tensor, count: float | Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The mean loss over the items of all ranks: to be back-propagated under DDP, and to be logged.

    Its value is Σ loss_sum / Σ count over the ranks, the same bits on each. Its gradient is that of
    Lᵣ above, W/N times that of this rank's `loss_sum`, of which DDP's average makes the gradient of
    the value. Every rank of the group has to call it, also one whose count is 0: its `loss_sum` is
    then a zero that still hangs on the parameters, such as the sum of no losses, because DDP waits
    for that rank's backward too. To accumulate micro-batches, see `loss_scale`.

    Args:
        loss_sum: one element: the *sum* of this rank's losses. An integer sum (correct answers, for
            an accuracy) gives a mean of the default dtype.
        count: how many items are summed, or the sum of their weights; a constant, not
            differentiated.
        group: the process group; the default one when None.

    Raises ValueError, on every rank, if a rank has a negative count, if all counts are 0, or if
    `loss_sum` requires a gradient on some ranks only; and, on this rank, if `loss_sum` or `count`
    has more than one element.

    Costs one all-reduce of 32 bytes (four float64: counts are exact up to 2⁵³), and with a GPU a
    wait for the loss.
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
    """`value`, whose gradient is that of `share`; also where `share` is infinite."""

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
    """W / N, by which each rank multiplies its loss sums; for windows of several micro-batches.

    N has to count the whole window before its first backward, because that backward already
    divides by it. Dividing each micro-batch by its own count instead, and the sum by their number,
    is the mean of means: wrong for the same reason as across ranks.

        for window, count in accumulation_windows(loader, 4, count_tokens):
            scale = loss_scale(count)
            for i, batch in enumerate(window):
                with nullcontext() if i == len(window) - 1 else model.no_sync():
                    (loss_sum(model, batch) * scale).backward()

    and `global_mean(sum of the window's loss sums, count)` is what to log. Ranks may hold windows
    of different lengths: only the last backward of each communicates.

    Args:
        count: what this rank's window counts in all.
        group: the process group; the default one when None.
        device: where to communicate: a GPU under NCCL. By default that of `count`, or the CPU.

    Raises and costs what `global_mean` does.
    """
    if device is None:
        device = count.device if isinstance(count, Tensor) else "cpu"
    nothing = torch.zeros((), device=device)
    _, total_count = _over_all_ranks(nothing, count, nothing.device, group)
    return dist.get_world_size(group) / float(total_count)


def accumulation_windows(
    batches: Iterable[Batch], size: int, count: Callable[[Batch], int]
) -> Iterator[tuple[list[Batch], int]]:
    """Cut `batches` into windows of `size` micro-batches, each with what it counts in all.

    The last window may be shorter. It needs no special care, for it counts less, whereas a loss
    divided by `size` would be too small in it. A window's batches (not their activations) are in
    memory at the same time.

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
    """Cross-entropy summed over tokens, and the count to divide it by, once it is global.

    Args:
        logits: (…, V), at least float32 in the computation. Not shifted here: `logits[i]` is to
            predict `targets[i]`.
        targets: (…), integers; those equal to `ignore_index` (padding) are not counted.
        weights: (…), of each token; the sum is then Σwℓ and the count Σw.
        ignore_index: as in `torch.nn.functional.cross_entropy`.

    Returns the sum and the count, both 0-d. Of targets that are all ignored the sum is a zero that
    can be back-propagated, as a rank without a token needs.
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
    weights = weights.flatten() * counted
    return (losses * weights).sum(), weights.sum()


def _over_all_ranks(
    loss_sum: Tensor, count: float | Tensor, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Sum and count over the ranks, in float64. What makes no sense anywhere raises everywhere."""
    size_of_group(group)
    own = torch.as_tensor(count, dtype=torch.float64, device=device).detach()
    if own.numel() != 1:
        raise ValueError(f"count has shape {tuple(own.shape)}: pass one number, such as mask.sum()")
    # A rank that raised at once on its own bad input would leave the others waiting for it, so the
    # ranks tell each other.
    bad, attached = not own >= 0, loss_sum.requires_grad
    numbers = [loss_sum.detach().reshape(()), own.reshape(()), *own.new_tensor([bad, attached])]
    totals = torch.stack([number.double() for number in numbers])
    dist.all_reduce(totals, group=group)
    total, total_count, bad_ranks, attached_ranks = totals.unbind()
    world_size = dist.get_world_size(group)
    if bad_ranks:
        raise ValueError(
            f"a negative count (or NaN) on {int(bad_ranks)} of {world_size} ranks; this one's is "
            f"{float(own):g}. Count items, or add up their weights"
        )
    if not total_count:
        raise ValueError(
            "the count is 0 on every rank, and there is no mean of nothing: skip this step on all "
            "ranks, or look at why every item is masked or ignored"
        )
    if 0 < attached_ranks < world_size:
        raise ValueError(
            f"loss_sum requires a gradient on {int(attached_ranks)} of {world_size} ranks only "
            f"(this one: {attached}), and in their backward DDP would wait for the others: where "
            "nothing is counted, pass a zero that hangs on the parameters, such as 0 * output.sum()"
        )
    return total, total_count
