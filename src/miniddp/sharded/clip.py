"""Clip by the norm of the whole gradient, of which each rank holds a part.

A norm over this rank's rows alone is too small, by about √W, and differs between the ranks: each
would then scale by another factor, and the parts would no longer be those of one step.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; return the norm.

    Args:
        parameters: sharded ones, in any mixture with ordinary ones that are equal on all ranks.
        max_norm: the largest norm allowed.
        norm_type: the p of the p-norm; `inf` for the largest absolute value.

    Every rank must call it, and gets the same norm: a float32 scalar, 0 without gradients. Rows
    that several replicas hold (HSDP) count once. Costs one all-reduce of a number per group of
    ranks. Source: torch.nn.utils.clip_grad_norm_.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    local: dict[dist.ProcessGroup | None, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        sharding = getattr(parameter, "sharding", None)
        group = sharding.group if sharding else None
        # Also without a gradient: another rank may hold rows that have one.
        norms = local[group]
        if parameter.grad is not None and parameter.grad.numel() > 0:
            norms.append(torch.linalg.vector_norm(parameter.grad.float(), norm_type))
    device = parameters[0].device if parameters else torch.device("cpu")
    largest = math.isinf(norm_type)
    totals = []
    for group, norms in local.items():
        stacked = torch.stack(norms).double() if norms else torch.zeros(1, dtype=torch.float64)
        total = stacked.max() if largest else stacked.pow(norm_type).sum()
        total = total.to(device)
        if group is not None:
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(total, op=op, group=group)
        totals.append(total)
    if not totals:
        return torch.zeros((), device=device)
    every = torch.stack(totals)
    norm = (every.max() if largest else every.sum().pow(1 / norm_type)).float()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
