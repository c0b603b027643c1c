"""Static graph: every iteration uses the same parameters, each as often as in the first.

In the first backward the reducer only counts how often each gradient arrives, and launches nothing.
At its end it reduces everything at once. From then on a gradient is ready at its last arrival, so
reentrant checkpointing and shared parameters work. The reducer does not wait for parameters that
were unused in the first iteration.

Cost: the first backward overlaps nothing and sends 4 bytes more per parameter.
Source: static_graph_first_iteration and delay_all_reduce in
torch/csrc/distributed/c10d/reducer.cpp.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from miniddp import errors
from miniddp.autograd_graph import at_end_of_backward
from miniddp.reducer import ReducerState
from miniddp.torch_drop_in.fast import FastReducer

_STATIC = "this is not compatible with static_graph set to True."


class StaticGraphReducer(FastReducer):
    """A reducer for graphs that never change, if it is told so before the first iteration."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.static_graph = False
        self.learns_graph = False
        # What to do at the end of the next backward if no tensor is found in the output. Its first
        # gradient tells that it has begun (or, with a reentrant checkpoint, only a part of it).
        self.act_at_first_gradient: Callable[[Any], Any] | None = None
        self.firings: list[int] = []  # arrivals of each gradient per backward
        self.pending_firings: list[int] = []
        super().__init__(*args, **kwargs)

    def expect_static_graph(self) -> None:
        """Every later iteration must have the same graph; the next backward is used to learn it."""
        self.static_graph = self.learns_graph = True
        self.lock_free = False
        self.find_unused_parameters = False
        self.firings = [0] * len(self.parameters)

    def reset_bucket_counting(self) -> None:
        super().reset_bucket_counting()
        if self.learns_graph:  # an interrupted backward taught nothing
            self.firings = [0] * len(self.parameters)
        self.pending_firings = list(self.firings)

    def expect_autograd_hook(self, index: int) -> bool:
        if self.act_at_first_gradient is not None and self.state is ReducerState.READY:
            at_end_of_backward(partial(self.act_at_first_gradient, self))
            self.act_at_first_gradient = None
        if not self.static_graph:
            return super().expect_autograd_hook(index)
        if self.learns_graph:
            self.usage.mark(index)
            if self.state is ReducerState.READY:
                self.firings[index] += 1
                return False
        if not super().expect_autograd_hook(index):
            idle = self.state is ReducerState.IDLE and not self.learns_graph
            if idle and self.firings[index] == 0:
                raise self.error(_graph_changed(self.names[index], index, self.rank))
            return False
        self.pending_firings[index] -= 1
        if self.pending_firings[index] < 0:
            raise self.error(_graph_changed(self.names[index], index, self.rank))
        return self.pending_firings[index] == 0

    @torch.no_grad()
    def learn_graph(self) -> bool:
        """At the end of the first backward: note what arrived, reduce everything. True if so."""
        # It is called more than once per backward, and for a pass of autograd.grad.
        if not self.learns_graph or not any(self.firings):
            return False
        with self.lock:
            self.learns_graph = False
            self.usage.all_reduce()
            self.forget_unused()
            self.enter(ReducerState.REDUCING)
            self.current_divisor = self.divisor()
            for index in range(len(self.parameters)):
                self.mark_variable_ready(index)
        return True

    def forget_unused(self) -> None:
        """No later backward waits for the parameters that never received a gradient."""
        self.usage.unreachable = [index for index, count in enumerate(self.firings) if count == 0]

    def ensure_prior_reduction_finished(self) -> None:
        if self.static_graph and self.state is ReducerState.REDUCING:
            reason = (
                "This error indicates that your training graph has changed in this iteration, "
                "e.g., one parameter is used in first iteration, but then got unused in the "
                f"second iteration. {_STATIC}"
            )
            message = errors.unfinished(self.rank, self.absent(), False, reason)
            raise self.error(message + self.advice.unfinished)
        super().ensure_prior_reduction_finished()


def _graph_changed(name: str, index: int, rank: int) -> str:
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        f"iteration, but then got used in the second iteration. {_STATIC}\nThe parameter is "
        f"{name} (index {index}), on rank {rank}."
    )
