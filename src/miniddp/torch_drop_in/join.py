"""Uneven inputs: what a rank that has run out of data does while the others continue.

A collective needs every rank of its group. So a rank that has joined (has no more inputs) takes
part in every collective of the others' forward and backward, and contributes gradients of zeros.
The sum is divided either by the world size W, so that every input of the epoch has the same weight,
or by the number of ranks that still have inputs, as if the others did not exist.

Cost for a joined rank: the same collectives as the others, without the computation. All ranks make
two more all-reduces of one number in each forward: the number of ranks that still have inputs, and
whether this backward is reduced. If buffers are synchronized, a third one finds the source rank;
`throw_on_early_termination` adds another. Backward needs no more, except the first backward of a
static graph: one all-reduce of one number per parameter.
Source: torch/distributed/algorithms/join.py and _DDPJoinHook in torch/nn/parallel/distributed.py.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from miniddp.comm import wait_for
from miniddp.extras.grad_bucket import GradBucket
from miniddp.replicas import broadcast_tensors
from miniddp.torch_drop_in.strict import gather_faults

if TYPE_CHECKING:
    from miniddp.torch_drop_in.torch_reducer import TorchReducer


def learn_and_share(reducer: "TorchReducer") -> None:
    """Learn this rank's static graph, then send it to the ranks that have joined."""
    if reducer.learn_graph():
        own = reducer.firings
        exchange_firings(reducer)
        reducer.firings = own  # it may differ from the others'
        reducer.forget_unused()


def exchange_firings(reducer: "TorchReducer") -> None:
    """Take the union of the static graphs of the ranks with inputs."""
    firings = torch.tensor(reducer.firings, device=reducer.device)
    largest = dist.ReduceOp.MAX
    wait_for(dist.all_reduce(firings, op=largest, group=reducer.process_group, async_op=True))
    reducer.firings = firings.tolist()
    reducer.forget_unused()


def highest_rank(ddp: Any, is_candidate: bool) -> int:
    """The highest rank among the candidates, on every rank; one of them has to be one."""
    rank = ddp.process_group.rank() if is_candidate else -1
    flag = torch.tensor([rank], device=ddp.device)
    largest = dist.ReduceOp.MAX
    wait_for(dist.all_reduce(flag, op=largest, group=ddp.process_group, async_op=True))
    if flag.item() == -1:
        raise ValueError("no rank can be the broadcast source: Join and forward are out of step")
    return int(flag.item())


def tell_whether_synced(ddp: Any, is_joined_rank: bool) -> bool | None:
    """Tell the joined ranks whether this iteration's backward is reduced; they need to know."""
    wants = not is_joined_rank and ddp.require_backward_grad_sync
    flag = torch.tensor([float(wants)], device=ddp.device)
    work = dist.all_reduce(flag, group=ddp.process_group, async_op=True)
    if not is_joined_rank:
        return None
    wait_for(work)
    return flag.item() != 0


def refuse_to_join(ddp: Any) -> None:
    """Raise ValueError for settings that let the inputs decide what is sent."""
    for setting, is_set in (
        ("skip_all_reduce_unused_params", ddp.skip_all_reduce_unused_params),
        ("delay_all_reduce_named_params", ddp._delayed is not None),
    ):
        if is_set:
            raise ValueError(
                f"{setting} does not go with join(): a rank without inputs cannot know what "
                "the others send. Leave one of the two out."
            )


class DDPJoinHook(JoinHook):
    """On a rank that has joined: answers the collectives of the others, in their order.

    `ddp` is the wrapper of this rank.
    """

    def __init__(self, ddp: Any):
        self.ddp = ddp

    def main_hook(self) -> None:
        """Answer one iteration of the ranks that still have inputs."""
        ddp, reducer = self.ddp, self.ddp.reducer
        reducer.rebuild_buckets()
        if ddp._check_sync_bufs_pre_fwd():
            ddp.sync_buffers_from(highest_rank(ddp, False))
        synced = tell_whether_synced(ddp, is_joined_rank=True)
        ddp.require_forward_param_sync = synced
        if not synced:
            return
        learns, reducer.learns_graph = reducer.learns_graph, False
        if learns:  # in a static graph's first backward, ranks first share what they used
            reducer.usage.all_reduce()
        self.reduce_zeros()
        if learns:  # that backward records no order of arrival and has no strict check
            exchange_firings(reducer)
            return
        if reducer.find_unused_parameters:
            used = torch.zeros(len(reducer.parameters), dtype=torch.int32, device=reducer.device)
            wait_for(dist.all_reduce(used, group=reducer.process_group, async_op=True))
        if ddp.strict and (message := gather_faults(reducer, [])):
            raise reducer.error(message)
        if not reducer.order:  # be ready to take rank 0's plan at the next rebuild
            reducer.order = list(range(len(reducer.parameters)))

    def reduce_zeros(self) -> None:
        """Answer the reduction of each bucket, by zeros."""
        reducer = self.ddp.reducer
        count = len(reducer.buckets)
        zeros = [GradBucket(b, n, count, b.zeros()) for n, b in enumerate(reducer.buckets)]
        for future in [reducer.run_comm_hook(bucket) for bucket in zeros]:
            future.wait()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined: take the model of a rank that joined last, which took every step."""
        ddp = self.ddp
        if ddp.mixed_precision is not None:
            ddp._precision.restore_full_precision()
        ddp._authoritative_rank = highest_rank(ddp, is_last_joiner)
        buffers = ddp.synced_buffers() if ddp.broadcast_buffers else {}
        state = ddp.synced_parameters() | buffers
        broadcast_tensors(list(state.values()), ddp.process_group, ddp._authoritative_rank)
