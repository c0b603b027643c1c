"""Taking the time of the first steps, to plan the buckets by it.

`MiniDDP(module, bucket_plan="measured")` begins like any other: one bucket, then those of the caps.
Over the next steps each rank notes when its gradients are ready. Then, once, before a forward:

1. the link is measured: a few all-reduces of 1 KiB and of 4 MiB, their time and the processor's,
   and a copy;
2. the ranks agree on the figures, taking the slowest rank's of each, since a bucket leaves when the
   last rank has filled it;
3. `miniddp.extras.planner.measured_plan` makes the plan, and rank 0's is broadcast and adopted.

The processor's time counts, because on one machine an all-reduce is work of the same cores that
compute backward: there is then little to hide, and the plan stays what the caps make it. (Cores to
spare are not looked for, so with many of them this is too careful.)

Cost: a hook a gradient for a few steps, which then goes; 16 MiB of all-reduces; three messages.
From three ranks on, the last bits of a sum depend on the buckets, and these now on times: runs
differ in them.
"""

import weakref
from collections.abc import Callable
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp.buckets import MIB
from miniddp.extras.planner import LinkCost, measured_plan
from miniddp.replicas import wait_for

if TYPE_CHECKING:
    from miniddp.torch_drop_in.reducer import TorchReducer

WARM_UP = 2  # in one bucket, then in those of the caps: both touch new memory
STEPS = 5
_SHORT, _LONG = 1024, 4 * MIB


class FirstSteps:
    """The clock of one reducer's first steps; to be dropped once `before_forward` returns True."""

    def __init__(self, reducer: "TorchReducer"):
        self.reducer = reducer
        self.steps: list[list[float]] = []
        self._begin_step()
        handles = [
            parameter.register_post_accumulate_grad_hook(_hook_for(weakref.ref(self), index))
            for index, parameter in enumerate(reducer.parameters)
        ]
        self.remove_hooks = weakref.finalize(self, lambda: [handle.remove() for handle in handles])
        self.remove_hooks.atexit = False

    def _begin_step(self) -> None:
        self.began = perf_counter()
        self.ready: dict[int, float] = {}

    def note(self, index: int) -> None:
        """The gradient of parameter `index` is ready."""
        if self.reducer.expects_gradients():
            self.ready[index] = perf_counter() - self.began

    def before_forward(self) -> bool:
        """Called before each forward with gradients: after enough steps, plan; True if it was now.

        Every rank has to have taken part in the same reductions, as in any collective.
        """
        if self.ready:
            unused_until = min(self.ready.values())  # when the reducer counts them as ready
            parameters = range(len(self.reducer.parameters))
            self.steps.append([self.ready.get(index, unused_until) for index in parameters])
        enough = len(self.steps) == WARM_UP + STEPS
        if enough:
            self.remove_hooks()
            self._plan()
        self._begin_step()
        return enough

    def _plan(self) -> None:
        reducer, group = self.reducer, self.reducer.process_group
        steps = torch.tensor(self.steps[WARM_UP:], dtype=torch.float64)
        costs = torch.tensor(measure_link(group), dtype=torch.float64)
        for figures in (steps, costs):
            wait_for(dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=group, async_op=True))
        latency, per_byte, cpu, cpu_per_byte, copy = costs.tolist()
        link = LinkCost(latency, per_byte, min(cpu, latency), min(cpu_per_byte, per_byte), copy)
        reducer.adopt(measured_plan(reducer.sizes(), steps.tolist(), link, reducer.caps))


def _hook_for(this: weakref.ref[FirstSteps], index: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        if (first_steps := this()) is not None:
            first_steps.note(index)

    return hook


def measure_link(group: dist.ProcessGroup) -> LinkCost:
    """What an all-reduce on `group` costs, as this rank sees it; every rank has to call it."""
    short, short_cpu = _seconds(torch.zeros(_SHORT // 4), group, times=9)
    long, long_cpu = _seconds(torch.zeros(_LONG // 4), group, times=3)
    per_byte = max(long - short, 0.0) / (_LONG - _SHORT)
    cpu_per_byte = max(long_cpu - short_cpu, 0.0) / (_LONG - _SHORT)
    return LinkCost(
        max(short - _SHORT * per_byte, 0.0),
        per_byte,
        max(short_cpu - _SHORT * cpu_per_byte, 0.0),
        cpu_per_byte,
        _seconds_of_a_copy() / _LONG,
    )


def _seconds_of_a_copy() -> float:
    """Of `_LONG` bytes, from a bucket to gradients: all are long out of the cache by then."""
    source, target = torch.zeros(8, _LONG // 4), torch.zeros(8, _LONG // 4)
    taken = []
    for to, of in zip(target, source, strict=True):
        begin = perf_counter()
        to.copy_(of)
        taken.append(perf_counter() - begin)
    return min(taken)


def _seconds(tensor: Tensor, group: dist.ProcessGroup, times: int) -> tuple[float, float]:
    """One all-reduce of `tensor`: (by the clock, of the processor in this process).

    The least of several, since whatever else runs on the machine only adds to them.
    """
    taken = []
    for _ in range(1 + times):
        begin, cpu = perf_counter(), process_time()
        wait_for(dist.all_reduce(tensor, group=group, async_op=True))
        taken.append((perf_counter() - begin, process_time() - cpu))
    wall, cpu = zip(*taken[1:], strict=True)  # in the first one ranks wait for each other
    return min(wall), min(cpu)
