"""Strict mode: what went wrong in a step is reported in that step, on every rank.

Otherwise a missing gradient is noticed by the next forward of the rank that lacks it, while the
others wait in a collective. Here each backward ends with one question to all ranks.

Cost per backward: one all-gather of one byte per parameter, and one byte more.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp import errors
from miniddp.autograd_graph import at_end_of_backward
from miniddp.comm import wait_for
from miniddp.nested import find_tensors
from miniddp.reducer import ReducerState

if TYPE_CHECKING:
    from miniddp.torch_drop_in.torch_reducer import TorchReducer


def at_end_of_each_backward(
    output: Any, reducer: "TorchReducer", act: Callable[["TorchReducer"], Any]
) -> bool:
    """Call `act(reducer)` at the end of each backward pass that enters a tensor in `output`.

    It is called once per such tensor, so it must be safe to call again. Returns whether `output`
    has such a tensor.
    """
    this = weakref.ref(reducer)

    def act_if_alive() -> None:
        if (reducer := this()) is not None:
            act(reducer)

    def on_entry(gradient: Tensor) -> None:
        at_end_of_backward(act_if_alive)

    entries = [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
    for tensor in entries:
        tensor.register_hook(on_entry)
    return len(entries) > 0


@torch.no_grad()
def complete_or_raise(reducer: "TorchReducer") -> None:
    """At the end of a backward: complete its reduction, then raise on every rank what one found.

    A missing gradient is completed with zeros, so that no rank waits forever. Raises RuntimeError
    if a gradient is missing on some rank, or a backward bypassed its wrapper.
    """
    with reducer.lock:
        # Without any gradient this was a pass of autograd.grad; the backward is still to come.
        if reducer.state is not ReducerState.REDUCING or reducer.checked:
            return
        reducer.checked = True
        absent = list(reducer.absent())
        for index in absent:
            reducer.mark_variable_ready(index)
        message = gather_faults(reducer, absent)
        reducer.unsynchronized = False
        if message is None:
            return

    def report() -> None:
        reducer.order = []  # no order of arrival to assign the buckets by
        raise reducer.error(message)

    at_end_of_backward(report)  # after the finalization, which is queued already


def gather_faults(reducer: "TorchReducer", absent: list[int]) -> str | None:
    """What the ranks found wrong in this backward, in words; None if nothing. The same everywhere.

    `absent` are the indices of the parameters without a gradient on this rank.
    """
    flags = torch.zeros(len(reducer.parameters) + 1, dtype=torch.uint8, device=reducer.device)
    flags[absent] = 1
    flags[-1] = reducer.unsynchronized
    group = reducer.process_group
    gathered = [torch.empty_like(flags) for _ in range(group.size())]
    wait_for(dist.all_gather(gathered, flags, group=group, async_op=True))
    absent_on_ranks = [of_rank[:-1].nonzero().flatten().tolist() for of_rank in gathered]
    if any(absent_on_ranks):
        return _absent_on_ranks(reducer, absent_on_ranks)
    unsynchronized_on = [rank for rank, of_rank in enumerate(gathered) if of_rank[-1]]
    return errors.unsynchronized(unsynchronized_on) if unsynchronized_on else None


def _absent_on_ranks(reducer: "TorchReducer", absent: list[list[int]]) -> str:
    lines = [
        f"Parameters which did not receive grad for rank {rank}: "
        f"{', '.join(reducer.names[index] for index in indices)}"
        for rank, indices in enumerate(absent)
        if indices
    ]
    if reducer.static_graph:
        remedy = (
            "With static_graph=True every iteration has to use the parameters of the first: if the "
            "graph changes, leave static_graph out. If it should not change, look"
        )
    elif reducer.find_unused_parameters:
        remedy = (
            "The outputs reach these parameters, but backward produced no gradient for them. Sum "
            "all losses and call backward() once. Otherwise look"
        )
    else:
        remedy = (
            "If that is meant, pass the keyword argument `find_unused_parameters=True` to the "
            "wrapper. If several backwards share a forward, sum their losses and call backward() "
            "once. Otherwise look"
        )
    return (
        "This backward did not produce the gradients of all parameters, and no rank took a step.\n"
        + "\n".join(lines)
        + f"\n{remedy} for outputs of `forward` that the loss does not use, and for branches of "
        "the model that were not taken."
    )
