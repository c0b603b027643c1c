"""Average the gradients by hand, after backward: data-parallel training in its plainest form.

A training step on W ranks has four parts:

1. forward: each rank computes the loss of its own share of the batch;
2. backward: each rank computes the gradient of that loss;
3. all-reduce: the gradients of all ranks are summed, and divided by W;
4. optimizer step: every rank applies the same average to the same parameters.

`average_gradients` is part 3, called between `loss.backward()` and `optimizer.step()`. Nothing is
overlapped: communication starts when backward has ended. The rest of this package makes the same
average, earlier.

Two things are easily got wrong, and are what most of this file is about:

- *Every rank must call the same collectives in the same order.* Skipping parameters whose gradient
  is None breaks that as soon as a gradient is missing on one rank only: two different parameters
  are then added together, silently, and at last some rank waits for ever. Here every trainable
  parameter takes part, always, in the module's order; a missing gradient counts as zeros.
- *A parameter that no rank used keeps `grad = None`.* Zeros would let Adam's momentum and weight
  decay move it, which a single process would not do.

Source: the function of this name in PyTorch's tutorial "Writing Distributed Applications with
PyTorch", which does neither; torch's DDP, which with find_unused_parameters=True does both.
"""

from __future__ import annotations

from itertools import groupby
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Combine = Literal["average", "sum"]


@torch.no_grad()
def average_gradients(
    module: nn.Module,
    *,
    flat: bool = False,
    combine: Combine = "average",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace every gradient of `module` by its average, or sum, over the ranks of `group`.

    Call it on every rank, after backward and before the optimizer step. Works in place on
    `parameter.grad` (any shape, any floating or complex dtype; a sparse gradient becomes dense). A
    gradient missing on some ranks counts as zeros there, and is created; one missing on every rank
    stays None.

    Args:
        module: the same parameters, of the same shapes, on every rank.
        flat: False sends one all-reduce a parameter. True copies all gradients into one buffer (one
            for each dtype and device) and sends that: fewer, larger messages, at the price of a copy
            in, a copy out, and a buffer as large as the gradients.
        combine: "average" divides the sum by W, what DDP does; "sum" leaves it, what DataParallel does.
        group: the process group; the default one when None.

    Raises ValueError for another `combine`.

    Costs, for P parameters of B bytes in all on W ranks: P + 1 all-reduces, or with `flat` one for
    each dtype and device, + 1; each ring all-reduce of b bytes sends 2(W−1)/W · b bytes a rank in
    2(W−1) steps. The extra one tells which gradients exist: P bytes.
    """
    if combine not in ("average", "sum"):
        raise ValueError(f'combine must be "average" or "sum", got {combine!r}')
    parameters = [p for p in module.parameters() if p.requires_grad]
    used = [
        p
        for p, anywhere in zip(parameters, _used_anywhere(parameters, group), strict=True)
        if anywhere
    ]
    gradients = [_own_gradient(p) for p in used]
    divisor = dist.get_world_size(group) if combine == "average" else 1
    if flat:
        _all_reduce_flat(gradients, divisor, group)
    else:
        _all_reduce_each(gradients, divisor, group)
    for parameter, gradient in zip(used, gradients, strict=True):
        parameter.grad = gradient


def _all_reduce_each(
    gradients: list[Tensor], divisor: int, group: dist.ProcessGroup | None
) -> None:
    for gradient in gradients:
        gradient /= divisor  # before the sum: a sum of W half-precision gradients may overflow
        dist.all_reduce(gradient, group=group)


def _all_reduce_flat(
    gradients: list[Tensor], divisor: int, group: dist.ProcessGroup | None
) -> None:
    def kind(gradient: Tensor) -> tuple[str, str]:
        return str(gradient.dtype), str(gradient.device)

    # Sorted by name, not by order of appearance, so that all ranks send the kinds in one order.
    for _, same_kind in groupby(sorted(gradients, key=kind), key=kind):
        parts = list(same_kind)
        buffer = torch.cat([part.reshape(-1) for part in parts])
        buffer /= divisor
        dist.all_reduce(buffer, group=group)
        for part, reduced in zip(parts, buffer.split([p.numel() for p in parts]), strict=True):
            part.copy_(reduced.view_as(part))


def _used_anywhere(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> list[bool]:
    """For each parameter, whether any rank has a gradient for it: one all-reduce, a byte each."""
    if not parameters:
        return []
    has_gradient = [p.grad is not None for p in parameters]
    used = torch.tensor(has_gradient, dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return used.bool().tolist()


def _own_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    # all_reduce wants dense memory without gaps; an expanded or sparse gradient has neither.
    return gradient.to_dense().contiguous() if gradient.is_sparse else gradient.contiguous()
