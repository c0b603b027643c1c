"""Average the gradients by hand, after backward: data-parallel training in its plainest form.

Each of W ranks computes the loss of its own part of the batch (forward) and that loss's gradient
(backward). The gradients of all ranks are summed and divided by W (all-reduce). Every rank then
applies the same average to the same parameters (step). `average_gradients` is the all-reduce. It
runs after backward: nothing overlaps. Two rules are easy to break:

- *Every rank must call the same collectives in the same order.* If one rank skips a parameter, its
  later gradients are added to those of other parameters, without an error if the sizes agree. The
  last all-reduce of the other ranks then hangs. Here zeros fill the gaps.
- *A parameter that no rank used keeps `grad = None`.* Zeros would let Adam's momentum and weight
  decay move it, which a single process would not do.

Source: `average_gradients` in PyTorch's tutorial "Writing Distributed Applications with PyTorch",
which assumes gradients everywhere; DDP with find_unused_parameters=True does not.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp import errors

Combine = Literal["average", "sum"]
Group = dist.ProcessGroup | None


@torch.no_grad()
def average_gradients(
    module: nn.Module, *, flat: bool = False, combine: Combine = "average", group: Group = None
) -> None:
    """Replace every gradient of `module` by its average, or sum, over the ranks of `group`.

    Call it on every rank, after backward and before the optimizer step. Gradients may have any
    shape and any floating or complex dtype; a sparse one becomes dense.

    Args:
        module: the same parameters, in the same order, on every rank.
        flat: send one buffer per dtype and device instead of one message per parameter.
        combine: "average" divides the sum by W, as DDP does; "sum" does not.
        group: the process group; the default one when None.

    Raises ValueError for another `combine`, and on a rank that is not in `group`.

    Cost, for P used parameters on W ranks: P all-reduces, after one of a byte per parameter that
    tells which gradients exist. With `flat`: one per dtype and device, flags included.
    """
    if combine not in ("average", "sum"):
        raise ValueError(f'combine must be "average" or "sum", got {combine!r}')
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    world_size = dist.get_world_size(group)
    if world_size < 0:  # the collectives below would only warn
        raise ValueError(errors.outside_the_group(dist.get_rank()))
    gradients = [local_gradient(p) for p in parameters]
    has_gradient = [p.grad is not None for p in parameters]
    divisor = world_size if combine == "average" else 1
    combine_all = _all_reduce_flat if flat else _all_reduce_each
    exists_somewhere = combine_all(gradients, has_gradient, divisor, group)
    for parameter, gradient, exists in zip(parameters, gradients, exists_somewhere, strict=True):
        if exists:
            parameter.grad = gradient


def _all_reduce_each(
    gradients: list[Tensor], has_gradient: list[bool], divisor: int, group: Group
) -> list[bool]:
    """Combine in place, one message per gradient. Returns which of them any rank has."""
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
    gradients: list[Tensor], has_gradient: list[bool], divisor: int, group: Group
) -> list[bool]:
    """Combine in place, one message per dtype and device. Returns which gradients any rank has."""
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
        for i, exists in zip(indices, (flags != 0).tolist(), strict=True):
            exists_somewhere[i] = exists
    return exists_somewhere


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's gradient, dense and contiguous, as collectives need it; zeros if it is None."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    dense = gradient.to_dense() if gradient.is_sparse else gradient.contiguous()
    return dense.resolve_conj().resolve_neg()  # collectives send what lies in memory
