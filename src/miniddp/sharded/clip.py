"""Clip by the norm of the whole gradient. Each rank holds a part of it.

The norm of this rank's rows alone is about √W times too small, and differs between the ranks. Each
rank would scale its part by another factor.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.sharded.sharding import all_gather_single


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; return the norm.

    Args:
        parameters: sharded ones, in any mixture with ordinary ones that are equal on all ranks.
        max_norm: the largest norm allowed.
        norm_type, error_if_nonfinite, foreach: as in torch.nn.utils.clip_grad_norm_, the source.

    Every rank must call it, and gets the same norm: a scalar, 0 without gradients. Rows that
    several replicas hold (HSDP) count once. Costs one all-gather of a number per group of ranks.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    # Also of a group without gradients here: another rank may hold rows that have one.
    gradients: dict[dist.ProcessGroup | None, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        sharding = getattr(parameter, "sharding", None)
        of_group = gradients[sharding.group if sharding else None]
        if (gradient := parameter.grad) is not None:
            of_group.append(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
    norms = [torch.zeros((), device=parameters[0].device if parameters else None)]
    for group, of_group in gradients.items():
        norm = nn.utils.get_total_norm(of_group, norm_type, foreach=foreach).to(norms[0])
        if group is None:
            norms.append(norm)
        else:
            of_ranks = norm.new_empty(group.size())
            all_gather_single(of_ranks, norm.view(1), group=group)
            norms += of_ranks
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradients is {total.item()}, so nothing was clipped")
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach=foreach)
    return total
