"""Unused parameters: which of them a backward leaves out, on this rank and on every rank.

With `find_unused_parameters=True`:

1. *Search.* After a synchronized forward, walk the graph from its outputs. A parameter whose
   accumulator is not reached gets no gradient on this rank; its bucket must not wait for one.
2. *Mark.* Each gradient that arrives, also under `no_sync()`, marks its parameter as used here.
3. *All-reduce.* After the last bucket, one all-reduce counts the ranks that used each parameter.
4. *Write.* A parameter that some rank used gets the average, in which the others count as zeros.
   One that no rank used keeps its `.grad`: zeros would let momentum and weight decay move it.

Cost per backward: one visit per node of the graph, and one all-reduce of 4 bytes per parameter.
Source: search_unused_parameters and all_reduce_local_used_map in torch's reducer.cpp.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.profiler import record_function

from miniddp.autograd_graph import reachable_from
from miniddp.replicas import wait_for


class UsedParameters:
    """Which of `parameters` the ranks of `process_group` use, from one reduction to the next."""

    def __init__(self, parameters: Sequence[Tensor], process_group: dist.ProcessGroup):
        self.parameters, self.process_group = parameters, process_group
        self.unreachable: list[int] = []  # indices that the announced backward cannot reach
        self.used = [0] * len(parameters)  # on this rank, since the last reduction
        self.counts = torch.empty(0)  # per parameter: how many ranks used it
        # Per parameter, whether no rank used it; None until the all-reduce has been waited for.
        self.nowhere: list[bool] | None = None

    def search(self, accumulators: Sequence[Node], outputs: Iterable[Tensor]) -> None:
        """Find the parameters that no path from `outputs` reaches."""
        with record_function("miniddp.search_unused_parameters"):
            reachable = reachable_from(outputs)
        self.unreachable = [i for i, node in enumerate(accumulators) if node not in reachable]

    def mark(self, index: int) -> None:
        """Count a parameter as used on this rank, if it has a gradient."""
        if self.parameters[index].grad is not None:
            self.used[index] = 1

    def all_reduce(self) -> None:
        """Start to count, for each parameter, the ranks that used it."""
        device = self.parameters[0].device
        self.counts = torch.tensor(self.used, dtype=torch.int32, device=device)
        self.work = dist.all_reduce(self.counts, group=self.process_group, async_op=True)
        self.nowhere = None

    def slots_to_write(self, indices: Sequence[int]) -> list[int]:
        """The positions in `indices` of the parameters that some rank used."""
        return [s for s, i in enumerate(indices) if self.used[i] or not self._unused_everywhere(i)]

    def _unused_everywhere(self, index: int) -> bool:
        if self.nowhere is None:  # wait only when a parameter is unused on this rank
            wait_for(self.work)
            self.nowhere = (self.counts == 0).tolist()
        return self.nowhere[index]

    def reset(self) -> None:
        """After a reduction: nothing is used yet."""
        self.used = [0] * len(self.used)
