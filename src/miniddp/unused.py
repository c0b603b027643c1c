"""Unused parameters: those that a backward leaves out, on this rank or on all ranks.

With `find_unused_parameters=True`:

1. *Search.* After a synchronized forward, search the graph from its outputs. Parameters that
   the search does not reach count as arrived when this rank's first gradient arrives. If it reaches
   none, no gradient arrives here, and the other ranks hang, as with torch's DDP.
2. *Gate.* The outputs of each forward with grad pass through one node of the graph, `OutputGate`,
   so that a loss on some of them still runs the hook of every parameter that was reached.
3. *Mark.* Each gradient that arrives, also under `no_sync()`, marks its parameter as used here.
4. *All-reduce.* After the last bucket, one all-reduce counts the ranks that used each parameter.
5. *Write.* If some rank used a parameter, its `.grad` gets the average; a `.grad` of None counts
   as zeros. If none did, its `.grad` stays: zeros would let momentum and weight decay move it.

Cost: microseconds per node of the graph, a copy of the outputs, an all-reduce of 4 bytes per
parameter. Source: torch's reducer.cpp; _DDPSink in torch/nn/parallel/distributed.py.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.profiler import record_function

from miniddp.comm import wait_for


class UsedParameters:
    """Which of `parameters` the ranks of `process_group` use, from one reduction to the next."""

    def __init__(self, parameters: Sequence[Tensor], process_group: dist.ProcessGroup):
        self.parameters, self.process_group = parameters, process_group
        self.unreachable: list[int] = []  # indices that the announced backward cannot reach
        self.reset()
        self.counts = torch.empty(0)  # per parameter: how many ranks used it
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

    def slots_to_write(self, indices: Sequence[int]) -> list[int]:
        """The positions in `indices` of the parameters that some rank used."""
        if not self.anywhere and not all(self.used[index] for index in indices):
            wait_for(self.work)  # only if this rank lacks one of these gradients
            self.anywhere = (self.counts > 0).tolist()
        return [s for s, i in enumerate(indices) if self.used[i] or self.anywhere[i]]


class OutputGate(torch.autograd.Function):
    """The identity on all outputs together: backward visits all of them or none.

    The hooks of parameters behind an ignored output then run, with an undefined gradient. Without
    the gate they would not, and their buckets would never be full.
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
        """`output` with every tensor that requires grad passed through one gate."""
        tensors = find_tensors(output)
        gated = iter(cls.apply(clone, *(t for t in tensors if t.requires_grad)) or ())
        replacements = [next(gated) if t.requires_grad else t for t in tensors]
        return replace_tensors(output, iter(replacements))


def find_tensors(output: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts, and dataclasses, in a fixed order."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for part in _parts(output).values() for tensor in find_tensors(part)]


def replace_tensors(output: Any, replacements: Iterator[Tensor]) -> Any:
    """A copy of `output` in which each tensor of `find_tensors(output)` is the next replacement."""
    if isinstance(output, Tensor):
        return next(replacements)
    parts = {key: replace_tensors(part, replacements) for key, part in _parts(output).items()}
    if not parts:
        return output
    if isinstance(output, tuple):
        values = parts.values()
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    replaced = copy.copy(output)
    indexed = isinstance(output, dict | list)
    assign = replaced.__setitem__ if indexed else partial(object.__setattr__, replaced)
    for key, part in parts.items():
        assign(key, part)
    return replaced


def _parts(output: Any) -> dict[Any, Any]:
    if isinstance(output, dict):  # first: a model output may be a dict and a dataclass
        return dict(output)
    if isinstance(output, list | tuple):
        return dict(enumerate(output))
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {}
