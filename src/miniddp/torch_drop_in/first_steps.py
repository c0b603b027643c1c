"""The bucket planner's measurements: time the first steps, plan the buckets, try the plan.

`DistributedDataParallel(module, bucket_plan="measured")` starts as usual: with one bucket in the
first step, then with the buckets of the usual caps. In the next steps each rank records when its
gradients are ready. Then, between two steps:

1. *Measure* the link: all-reduces of 1 KiB and of 4 MiB, in elapsed and in processor time, and a
   copy. All ranks use the slowest rank's values, because an all-reduce starts only after the last
   rank has filled its bucket.
2. *Plan* (`miniddp.extras.planner.measured_plan`).
3. *Try* that plan and a few fixed caps for a few steps each, and keep the fastest. The planner's
   model does not include caches and other processes; measured steps do. Rank 0's medians decide,
   and its plan is broadcast, so every rank uses the same plan.

Processor time matters because on one machine an all-reduce uses the cores that compute backward.
Idle cores are not taken into account, so on a machine with many of them the plan is too cautious.

Cost: one hook per gradient for seven steps. Once: 16 MiB of all-reduces, 64 MiB of memory for the
copy, and three small messages. Then up to 20 steps with other buckets, and one small broadcast per
candidate. With three or more ranks, the last bits of a sum depend on the buckets. These now depend
on measured times, so the last bits may differ between two runs.
"""

import weakref
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp.buckets import MIB, Plan, arrival_plan
from miniddp.comm import wait_for
from miniddp.extras.planner import LinkCost, measured_plan

if TYPE_CHECKING:
    from miniddp.torch_drop_in.reducer import TorchReducer

WARM_UP = 2  # in one bucket, then in those of the caps: both touch new memory
STEPS = 5
TRIED_CAPS = (1 * MIB, 2 * MIB, 4 * MIB)
TRIAL = 3  # steps on the clock per candidate, after one to warm up
SETTLED_AFTER = WARM_UP + STEPS + (2 + len(TRIED_CAPS)) * (1 + TRIAL) + 1  # at most, in steps
_SHORT, _LONG = 1024, 4 * MIB


class FirstSteps:
    """The clock of one reducer's first steps; to be dropped once `before_forward` returns True."""

    def __init__(self, reducer: "TorchReducer"):
        self.reducer = reducer
        self.steps: list[list[float]] = []
        self.candidates: list[Plan] = []
        self.seconds: list[list[float]] = []  # per candidate
        self.reductions = 0
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
        """Called before each forward with gradients; True once the plan is final.

        All ranks must have finished the same reductions, because this call may communicate.
        """
        reduced, self.reductions = (
            self.reductions < self.reducer.reductions,
            self.reducer.reductions,
        )
        settled = False
        if self.candidates and reduced:
            settled = self._try(perf_counter() - self.began)
        elif self.ready:
            settled = self._measure()
        self._begin_step()
        return settled

    def _measure(self) -> bool:
        unused_until = min(self.ready.values())  # when the reducer counts them as ready
        parameters = range(len(self.reducer.parameters))
        self.steps.append([self.ready.get(index, unused_until) for index in parameters])
        if len(self.steps) < WARM_UP + STEPS:
            return False
        self.remove_hooks()
        self.candidates = self._plans()
        self.seconds = [[]]
        self.reducer.adopt(self.candidates[0])
        return len(self.candidates) == 1

    def _plans(self) -> list[Plan]:
        """The measured plan, then those of fixed caps; each once."""
        reducer, group = self.reducer, self.reducer.process_group
        steps = torch.tensor(self.steps[WARM_UP:], dtype=torch.float64)
        costs = torch.tensor(measure_link(group), dtype=torch.float64)
        for figures in (steps, costs):
            wait_for(dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=group, async_op=True))
        latency, per_byte, cpu, cpu_per_byte, copy = costs.tolist()
        link = LinkCost(latency, per_byte, min(cpu, latency), min(cpu_per_byte, per_byte), copy)
        sizes = reducer.sizes()
        ready = steps.median(dim=0).values.tolist()
        order = sorted(range(len(sizes)), key=ready.__getitem__)
        plans = [measured_plan(sizes, steps.tolist(), link, reducer.caps)]
        for caps in (reducer.caps, *((cap,) for cap in TRIED_CAPS)):
            if (plan := arrival_plan(sizes, order, caps)) not in plans:
                plans.append(plan)
        return plans

    def _try(self, seconds: float) -> bool:
        """Count a step of the candidate in use; after the last candidate's, keep the fastest."""
        self.seconds[-1].append(seconds)
        if len(self.seconds[-1]) <= TRIAL:
            return False
        tried = len(self.seconds)
        settled = tried == len(self.candidates)
        if settled:
            medians = [median(of_one[1:]) for of_one in self.seconds]
            tried = medians.index(min(medians))
        else:
            self.seconds.append([])
        self.reducer.adopt(self.candidates[tried])
        return settled


def _hook_for(this: weakref.ref[FirstSteps], index: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        if (first_steps := this()) is not None:
            first_steps.note(index)

    return hook


def measure_link(group: dist.ProcessGroup) -> LinkCost:
    """What an all-reduce on `group` costs, as this rank sees it; every rank has to call it."""
    short, short_cpu = _seconds(_zeros(_SHORT), group, times=9)
    long, long_cpu = _seconds(_zeros(_LONG), group, times=3)
    per_byte = max(long - short, 0.0) / (_LONG - _SHORT)
    cpu_per_byte = max(long_cpu - short_cpu, 0.0) / (_LONG - _SHORT)
    return LinkCost(
        max(short - _SHORT * per_byte, 0.0),
        per_byte,
        max(short_cpu - _SHORT * cpu_per_byte, 0.0),
        cpu_per_byte,
        _seconds_of_a_copy() / _LONG,
    )


def _zeros(nbytes: int) -> Tensor:
    return torch.zeros(nbytes // 4, dtype=torch.float32)


def _seconds_of_a_copy() -> float:
    """Of `_LONG` bytes that are no longer in the cache, as from a bucket to its gradients."""
    source, target = _zeros(8 * _LONG), _zeros(8 * _LONG)
    taken = []
    for to, of in zip(target.chunk(8), source.chunk(8), strict=True):
        begin = perf_counter()
        to.copy_(of)
        taken.append(perf_counter() - begin)
    return min(taken)


def _seconds(tensor: Tensor, group: dist.ProcessGroup, times: int) -> tuple[float, float]:
    """Seconds of one all-reduce of `tensor`: (elapsed, this process's processor time).

    The least of several, since whatever else runs on the machine only adds to them.
    """
    taken = []
    for _ in range(1 + times):
        begin, cpu = perf_counter(), process_time()
        wait_for(dist.all_reduce(tensor, group=group, async_op=True))
        taken.append((perf_counter() - begin, process_time() - cpu))
    waits, works = zip(*taken[1:], strict=True)  # in the first one ranks wait for each other
    return min(waits), min(works)
