"""`MiniDDP(strict=True)`: what went wrong in a step is said in that step, on every rank.

Otherwise a gradient that never comes is noticed by the next forward of the rank that lacks it,
while the others wait in a collective. Here each backward ends with a question to all ranks.

Cost: one all-gather of a byte a parameter, and one byte more, for each backward.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from miniddp import errors as reducer_errors
from miniddp.replicas import wait_for

if TYPE_CHECKING:
    from miniddp.reducer import Reducer


def complete_or_raise(reducer: "Reducer") -> None:
    """At the end of a backward: complete its reduction, then raise on every rank what one found.

    What is missing is completed with zeros, so that no rank is left waiting in a collective.

    Raises:
        RuntimeError: a gradient is missing on some rank, or a backward went past its wrapper.
    """
    with reducer.lock:
        # A pass without any gradient was one of autograd.grad; the backward is still to come.
        if not reducer.armed or not (reducer.order or reducer.unfinished):
            return
        absent = reducer.absent()
        reducer.complete_with_zeros()
        absent_on_ranks, strayed_on = gather_faults(reducer, absent)
        reducer.strayed = False
        reducer.finalize()
        if any(absent_on_ranks) or strayed_on:
            reducer.order = []  # no order of arrival to pack the buckets by
        if any(absent_on_ranks):
            raise reducer.error(reducer_errors.absent_on_ranks(reducer, absent_on_ranks))
        if strayed_on:
            raise reducer.error(reducer_errors.strayed(strayed_on))


def gather_faults(reducer: "Reducer", absent: list[int]) -> tuple[list[list[int]], list[int]]:
    """For each rank the indices of the parameters without a gradient (`absent` are our own).

    And the ranks on which a backward went past the wrapper before.
    """
    flags = torch.zeros(len(reducer.parameters) + 1, dtype=torch.uint8, device=reducer.device)
    flags[absent] = 1
    flags[-1] = reducer.strayed
    group = reducer.process_group
    gathered = [torch.empty_like(flags) for _ in range(group.size())]
    wait_for(dist.all_gather(gathered, flags, group=group, async_op=True))
    return (
        [of_rank[:-1].nonzero().flatten().tolist() for of_rank in gathered],
        [rank for rank, of_rank in enumerate(gathered) if of_rank[-1]],
    )
