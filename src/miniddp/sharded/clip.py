"""Clip by the norm of the whole gradient, of which each rank holds a part.

A norm over this rank's rows alone is too small, by about √W, and differs between the ranks: each
would then scale by another factor, and the parts would no longer be those of one step.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; return the norm.

    Args:
        parameters: sharded ones, in any mixture with ordinary ones that are equal on all ranks.
        max_norm: the largest norm allowed.

    Every rank must call it, and gets the same norm: a float32 scalar, 0 without gradients. Rows
    that several replicas hold (HSDP) count once. Costs one all-reduce of a number per group of
    ranks. Source: torch.nn.utils.clip_grad_norm_.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    # Also of a group without gradients here: another rank may hold rows that have one.
    gradients: dict[dist.ProcessGroup | None, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        sharding = getattr(parameter, "sharding", None)
        of_group = gradients[sharding.group if sharding else None]
        if parameter.grad is not None:
            of_group.append(parameter.grad.float())
    device = parameters[0].device if parameters else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group, of_group in gradients.items():
        squares = nn.utils.get_total_norm(of_group).to(total).square()
        if group is not None:
            dist.all_reduce(squares, group=group)
        total += squares
    norm = total.sqrt().float()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
