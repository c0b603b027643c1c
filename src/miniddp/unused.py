"""Unused parameters: those that a backward leaves out, on this rank or on all ranks.

With `find_unused_parameters=True`:

1. *Search.* After a synchronized forward, search the graph from its outputs. Parameters that
   the search does not reach count as arrived when this rank's first gradient arrives. If it reaches
   none, no gradient arrives here, and the other ranks hang, as with torch's DDP.
2. *Sink.* The outputs of each forward with grad pass through one node of the graph, `DDPSink`,
   so that a loss on some of them still runs the hook of every parameter that was reached.
3. *Mark.* Each gradient that arrives, also under `no_sync()`, marks its parameter as used here.
4. *All-reduce.* After the last bucket, one all-reduce counts the ranks that used each parameter.
5. *Write.* If some rank used a parameter, its `.grad` gets the average; a `.grad` of None counts
   as zeros. If none did, its `.grad` stays: zeros would let momentum and weight decay move it.

Cost: microseconds per node of the graph, a copy of the outputs, an all-reduce of 4 bytes per
parameter. Source: torch's reducer.cpp; _DDPSink in torch/nn/parallel/distributed.py.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.profiler import record_function

from miniddp.comm import wait_for
from miniddp.nested import find_tensors, replace_tensors


class UsedParameters:
    """Which of `parameters` the ranks of `process_group` use, from one reduction to the next."""

    def __init__(self, parameters: Sequence[Tensor], process_group: dist.ProcessGroup):
        self.parameters, self.process_group = parameters, process_group
        self.unreachable: list[int] = []  # indices that the announced backward cannot reach
        self.creates_gradients = True  # where `.grad` is None by the end of a backward
        self.reset()
        # Per parameter: how many ranks used it; None until the first `all_reduce`.
        self.counts: Tensor | None = None
        self.anywhere: list[bool] = []  # `counts > 0` as bools; empty until `work` is waited for

    def reset(self) -> None:
        """After a reduction: nothing is used yet."""
        self.used = [0] * len(self.parameters)  # on this rank, since the last reduction

    def search(self, accumulators: Sequence[Node], outputs: Iterable[Tensor]) -> None:
        """Find the parameters that no path from `outputs` reaches."""
        with record_function("miniddp.search_unused_parameters"):
            reached = {get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad}
            to_visit = list(reached)
            while to_visit:
                for node, _ in to_visit.pop().next_functions:
                    if node is not None and node not in reached:
                        reached.add(node)
                        to_visit.append(node)
        self.unreachable = [i for i, node in enumerate(accumulators) if node not in reached]

    def mark(self, index: int) -> None:
        """Count a parameter as used on this rank, if it has a gradient."""
        if self.parameters[index].grad is not None:
            self.used[index] = 1

    def all_reduce(self) -> None:
        """Start counting, for each parameter, the ranks that used it."""
        device = self.parameters[0].device
        self.counts = torch.tensor(self.used, dtype=torch.int32, device=device)
        self.work = dist.all_reduce(self.counts, group=self.process_group, async_op=True)
        self.anywhere = []

    def slots_to_write(self, indices: Sequence[int]) -> Sequence[int]:
        """The positions in `indices` of the gradients that get their average."""
        slots: Sequence[int] = range(len(indices))
        if self.counts is not None:
            if not self.anywhere and not all(self.used[index] for index in indices):
                wait_for(self.work)  # only if this rank lacks one of these gradients
                self.anywhere = (self.counts > 0).tolist()
            slots = [s for s in slots if self.used[indices[s]] or self.anywhere[indices[s]]]
        if self.creates_gradients:
            return slots
        return [s for s in slots if self.parameters[indices[s]].grad is not None]


class DDPSink(torch.autograd.Function):
    """The identity on all outputs together: backward visits all of them or none.

    The hooks of parameters behind an ignored output then run, with an undefined gradient. Without
    the sink they would not, and their buckets would never be full.
    """

    @staticmethod
    def forward(ctx: Any, clone: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Without a copy, autograd treats the outputs as views and rejects in-place changes.
        return tuple(tensor.clone() for tensor in tensors) if clone else tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)

    @classmethod
    def pass_through(cls, output: Any, clone: bool = True) -> Any:
        """`output` with every tensor that requires grad passed through one sink."""
        tensors = find_tensors(output)
        sunk = iter(cls.apply(clone, *(t for t in tensors if t.requires_grad)) or ())
        replacements = [next(sunk) if t.requires_grad else t for t in tensors]
        return replace_tensors(output, iter(replacements))
