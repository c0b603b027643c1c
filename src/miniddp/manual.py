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

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.replicas import size_of_group

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

    Call it on every rank, after backward and before the optimizer step. It works on
    `parameter.grad`, of any shape and any floating or complex dtype; a sparse gradient becomes
    dense. A gradient missing on some ranks counts as zeros there, and is created; one missing on
    every rank stays None.

    Args:
        module: the same parameters, in the same order, on every rank.
        flat: False sends one all-reduce a parameter. True copies all gradients into one buffer
            (one for each dtype and device) and sends that: fewer, larger messages, at the price
            of a copy in, a copy out, and a buffer as large as the gradients.
        combine: "average" divides the sum by W, as DDP does; "sum" does not, as DataParallel.
        group: the process group; the default one when None.

    Raises ValueError for another `combine`, and on a rank that is not in `group`.

    Costs, for P parameters on W ranks: P all-reduces and one of P bytes, which tells the ranks
    what exists; with `flat` one for each dtype and device, in which that travels along. A ring
    all-reduce of b bytes sends 2(W−1)/W · b bytes a rank, in 2(W−1) steps.
    """
    if combine not in ("average", "sum"):
        raise ValueError(f'combine must be "average" or "sum", got {combine!r}')
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    gradients = [own_gradient(p) for p in parameters]
    has_gradient = [p.grad is not None for p in parameters]
    world_size = size_of_group(group)
    divisor = world_size if combine == "average" else 1
    combine_all = _all_reduce_flat if flat else _all_reduce_each
    exists_somewhere = combine_all(gradients, has_gradient, divisor, group)
    for parameter, gradient, exists in zip(parameters, gradients, exists_somewhere, strict=True):
        if exists:
            parameter.grad = gradient


def _all_reduce_each(
    gradients: list[Tensor],
    has_gradient: list[bool],
    divisor: int,
    group: dist.ProcessGroup | None,
) -> list[bool]:
    """Combine in place, one message a gradient. Returns which of them any rank has."""
    flags = torch.tensor(has_gradient, dtype=torch.uint8, device=gradients[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    exists_somewhere = flags.bool().tolist()
    for gradient, exists in zip(gradients, exists_somewhere, strict=True):
        if exists:
            # Divided before the sum: a sum of half-precision gradients may overflow.
            gradient /= divisor
            dist.all_reduce(gradient, group=group)
    return exists_somewhere


def _all_reduce_flat(
    gradients: list[Tensor],
    has_gradient: list[bool],
    divisor: int,
    group: dist.ProcessGroup | None,
) -> list[bool]:
    """Combine in place, one message in all. Returns which of the gradients any rank has."""
    of_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, gradient in enumerate(gradients):
        of_kind.setdefault((gradient.dtype, gradient.device), []).append(index)
    exists_somewhere = list(has_gradient)
    # In the order of first appearance among the parameters, which is the same on every rank.
    for indices in of_kind.values():
        parts = [gradients[i] for i in indices]
        flags = parts[0].new_tensor([has_gradient[i] for i in indices])
        buffer = torch.cat([*(part.reshape(-1) for part in parts), flags])
        buffer /= divisor
        dist.all_reduce(buffer, group=group)
        *reduced, flags = buffer.split([*(part.numel() for part in parts), len(parts)])
        for part, values in zip(parts, reduced, strict=True):
            part.copy_(values.view_as(part))
        for i, flag in zip(indices, flags, strict=True):
            exists_somewhere[i] = bool(flag != 0)
    return exists_somewhere


def own_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's gradient, dense and contiguous: zeros where it is None."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    # A collective wants dense memory without gaps; a sparse or expanded gradient has neither.
    return gradient.to_dense() if gradient.is_sparse else gradient.contiguous()
