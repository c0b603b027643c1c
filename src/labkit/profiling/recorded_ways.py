"""Several ways to average the same gradients, recorded on two ranks over a slow link.

A *way* makes what averages: `make(module, process_group)`. It may be a wrapper such as torch's
DistributedDataParallel, or an object with a `finish()` to be called after backward.

Recorded times differ from step to step by more than most ways do. `on_one_backward` lays the
messages of all ways on the same forward and backward, so that only what they send differs.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.launch.scripts import project_root
from labkit.profiling.cost_model import Backward, Link, ring
from labkit.profiling.recording import Gradient, RankRecording, Recorder, Recording, merge
from labkit.profiling.slow_link import SlowLink
from labkit.scenarios.toy_steps import loss_of
from labkit.testing.compare import flatten, gradients

Way = Callable[[nn.Module, dist.ProcessGroup], Any]
_STEPS = 3  # torch's DDP has rebuilt its buckets before the third


class RecordedWay(NamedTuple):
    """What was seen of one way.

    step: its third step, on both ranks.
    averages: `[rank]`, the averaged gradient, flattened.
    """

    step: Recording
    averages: list[Tensor]


def torch_ddp(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> nn.Module:
    """torch's DDP as a way; bind its keywords with `functools.partial`."""
    return DistributedDataParallel(module, process_group=group, **options)


def record_ways(
    ways: Mapping[str, Way],
    model: nn.Module,
    inputs: Tensor,
    gbit_per_s: float = 1,
    latency_us: float = 50,
) -> dict[str, RecordedWay]:
    """Two ranks on the CPU take three steps in each way; the last one is recorded.

    Each rank has its half of `inputs`. The link between them is slowed down in software to
    `gbit_per_s` and `latency_us`.
    """
    link = {"gbit_per_s": gbit_per_s, "latency_us": latency_us}
    found = {}
    for name, make in ways.items():
        of_ranks = run_ranks(_record, 2, make, model, inputs, link, device="cpu")
        recorded, averages = zip(*of_ranks, strict=True)
        found[name] = RecordedWay(merge(recorded), list(averages))
    return found


class ComputedStep(NamedTuple):
    """The computing half of a step: seconds of the forward, then when each gradient was ready."""

    forward: float
    backward: Backward


def stored_stack() -> ComputedStep:
    """A step of `toy_steps.stack_of_linears` that `labs/benchmarks/recorded_steps.py` recorded."""
    stored = project_root() / "labs/benchmarks/results/recorded_steps.json"
    stack = json.loads(stored.read_text())["stack"]
    ready = tuple(microseconds / 1e6 for microseconds in stack["ready"])
    return ComputedStep(stack["forward"] / 1e6, Backward(ready, tuple(stack["bytes"])))


def on_one_backward(
    recorded: Mapping[str, RecordedWay], computed: ComputedStep, link: Link
) -> dict[str, Recording]:
    """What two ranks send in each way, laid on one and the same forward and backward.

    A message is launched once as many gradients are ready as were at its recorded launch. The link
    carries one message at a time, by a ring. So the times depend on `computed`, on the link, and on
    the order of events, which is the same in every run.
    """
    forward, backward = computed
    gradients = tuple(
        Gradient(str(place), *gradient)
        for place, gradient in enumerate(zip(backward.bytes, backward.ready, strict=True))
    )
    laid = {}
    for name, one in recorded.items():
        collectives, free = [], 0.0
        for message in one.step.ranks[0].buckets():
            launched = backward.ready[message.after - 1]
            free = max(launched, free) + link.seconds(ring(2, message.bytes))
            collectives.append(message._replace(launched=launched, done=free))
        end = max(free, backward.end)
        rank = RankRecording(0, 0.0, end, ((0.0, forward),), gradients, tuple(collectives))
        laid[name] = Recording((rank,))
    return laid


def _record(
    rank: int,
    world_size: int,
    make: Way,
    model: nn.Module,
    inputs: Tensor,
    link: dict[str, float],
) -> tuple[RankRecording, Tensor]:
    mine = inputs.chunk(world_size)[rank]
    recorder = Recorder(model, SlowLink(**link))  # its hooks come first
    averager = make(model, recorder)
    for _ in range(_STEPS):
        model.zero_grad()
        dist.barrier()
        with recorder:
            loss_of(averager(mine)).backward()
            if hasattr(averager, "finish"):
                averager.finish()
    return recorder.recorded, flatten(gradients(model))
