"""The order of events in one backward, by the GPU's own clock.

`labkit.profiling.recording` takes the times at which the host queued the work. CUDA events are
taken where the work runs. A comm hook copies each bucket to the host on a stream of its own, with
an event before and after, and then averages as usual; another event is recorded at each gradient.
So the order that the reducer promises is read off the GPU: a bucket is copied after its last
gradient, and the first one while others are still being computed.

On a CPU the same code takes `time.perf_counter`.
"""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from miniddp.extras import comm_hooks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

from .equality import distance, gradients
from .machine import Evidence, Machine

SIZES = {"cuda": (8, 2048, 4096), "cpu": (6, 256, 64)}
"""Layers, their width, and the rows of a batch."""


class Lanes(NamedTuple):
    """In ms: when each gradient was ready; each bucket's parameters, and its copy's two ends."""

    ready: dict[int, float]
    copies: list[tuple[list[int], float, float]]


def now(device: torch.device) -> Any:
    """The moment on the current stream; `milliseconds` reads it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Any, moment: Any) -> float:
    """From `begin` to `moment`; the device has to be synchronized."""
    if isinstance(begin, float):
        return 1e3 * (moment - begin)
    return begin.elapsed_time(moment)


def record(rank: int, device: torch.device) -> tuple[Lanes, float]:
    """On each rank: one backward's lanes, and how far its gradients are from one process's."""
    layers, width, rows = SIZES[device.type]
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(device)
    world_size = dist.get_world_size()
    inputs = [
        torch.randn(rows, width, generator=torch.Generator().manual_seed(r)).to(device)
        for r in range(world_size)
    ]
    for x in inputs:
        (module(x).square().mean() / world_size).backward()
    wanted = gradients(module)
    number = {parameter: i for i, parameter in enumerate(module.parameters())}
    wrapped = DropIn(module, bucket_cap_mb=width * width * 4 / 2**20)
    gpu = device.type == "cuda"
    side = torch.cuda.Stream(device) if gpu else None
    ready: dict[int, Any] = {}
    copies: list[tuple[list[int], Any, Any]] = []

    def copy_and_average(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side) if side is not None else nullcontext():
            begin = now(device)
            host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=gpu)
            host.copy_(buffer, non_blocking=True)
            copies.append(([number[p] for p in bucket.parameters()], begin, now(device)))
        if side is not None:
            torch.cuda.current_stream(device).wait_stream(side)  # the average overwrites it
        return comm_hooks.average(None, bucket)

    wrapped.register_comm_hook(None, copy_and_average)
    for parameter, i in number.items():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, i=i: ready.__setitem__(i, now(device))
        )
    for _ in range(3):  # the buckets are rebuilt before the second step
        module.zero_grad()
        copies.clear()
        if gpu:
            torch.cuda.synchronize(device)
        origin = now(device)
        wrapped(inputs[rank]).square().mean().backward()
        if gpu:
            torch.cuda.synchronize(device)
    lanes = Lanes(
        {i: milliseconds(origin, moment) for i, moment in ready.items()},
        [(i, milliseconds(origin, a), milliseconds(origin, b)) for i, a, b in copies],
    )
    return lanes, distance(gradients(module), wanted).relative


def in_order(lanes: Lanes) -> bool:
    """Whether each bucket is copied after its last gradient, one bucket after another."""
    held = [i for indices, _, _ in lanes.copies for i in indices]
    begins = [begin for _, begin, _ in lanes.copies]
    late = all(
        max(lanes.ready[i] for i in indices) <= begin <= end for indices, begin, end in lanes.copies
    )
    return late and begins == sorted(begins) and sorted(held) == sorted(lanes.ready)


def find(machine: Machine) -> Iterator[Evidence]:
    group = machine.pair()
    of_ranks = group.run(record)
    ordered = all(in_order(lanes) for lanes, _ in of_ranks)
    right = all(apart < 1e-5 for _, apart in of_ranks)
    said = f"{len(of_ranks[0][0].copies)} buckets; in order: {ordered}; gradients right: {right}"
    yield Evidence("events: no copy before its gradients", group.label, ordered and right, said)
    early = [
        sum(begin < max(lanes.ready.values()) for _, begin, _ in lanes.copies)
        for lanes, _ in of_ranks
    ]
    said = f"copies that began before the last gradient, by rank: {early}"
    yield Evidence("events: copies overlap with backward", group.label, min(early) > 0, said)
