"""The timeline of one backward by the GPU's own clock: a lane that computes, and one that copies.

`labkit.profiling.recording` takes the times at which the host queued the work. CUDA events are
taken where the work runs. A comm hook copies each bucket to the host on a stream of its own,
all-reduces it there over gloo, and copies the average back; events before and after each copy make
one lane, events at each gradient the other. So the order that the reducer promises is read off the
GPU: a bucket is copied once its last gradient is there, and the first one while others are still
being computed.

On a CPU the same code takes `time.perf_counter`.
"""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from miniddp import MiniDDP

from .machine import Machine, synchronize
from .proofs import Evidence
from .training import distance, gradients

SIZES = {"cuda": (8, 2048, 4096), "cpu": (6, 256, 64)}
"""Layers, their width, and the rows of a batch."""


class Clock:
    """Moments on a device: `mark` notes one on the current stream, `milliseconds` reads it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin = self.mark()

    def mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, moment: Any) -> float:
        """Since the clock was made; the device has to be synchronized."""
        if self.device.type == "cpu":
            return 1e3 * (moment - self.begin)
        return self.begin.elapsed_time(moment)


class Lanes(NamedTuple):
    """In ms: by gradient when it was ready; by bucket its parameters and its two copies."""

    ready: list[tuple[int, float]]
    buckets: list[tuple[list[int], tuple[float, float], tuple[float, float]]]


class Staged:
    """A comm hook: the average by way of the host, with the moments of its copies."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self.clock = device, clock
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.copies: list[tuple[list[int], list[Any]]] = []

    def average(self, state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook; its annotations are checked, and may not be strings."""
        buffer = bucket.buffer()
        moments: list[Any] = []
        self.copies.append(([id(parameter) for parameter in bucket.parameters()], moments))
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream():
            moments.append(self.clock.mark())
            host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=self.stream is not None)
            host.copy_(buffer, non_blocking=True)
            moments.append(self.clock.mark())
        done: Future[Tensor] = Future(devices=[self.device] if self.stream is not None else None)
        self.thread.submit(self._exchange, buffer, host, moments, done)
        return done

    def _exchange(self, buffer: Tensor, host: Tensor, moments: list, done: Future) -> None:
        try:
            if self.stream is not None:
                moments[1].synchronize()
            dist.all_reduce(host)
            host /= dist.get_world_size()
            with self._on_stream():
                moments.append(self.clock.mark())
                buffer.copy_(host, non_blocking=True)
                moments.append(self.clock.mark())
                done.set_result(buffer)  # whoever waits for it waits for this stream
        except Exception as error:
            done.set_exception(error)

    def _on_stream(self) -> Any:
        if self.stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.stream)


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
    module.zero_grad()

    parameters = list(module.parameters())
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    wrapped = MiniDDP(module, bucket_cap_mb=width * width * 4 / 2**20)
    staged = Staged(device, Clock(device))
    wrapped.register_comm_hook(None, staged.average)
    ready: list[tuple[int, Any]] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: ready.append((number[id(parameter)], staged.clock.mark()))
        )
    for _ in range(3):  # the buckets are packed anew before the second step
        module.zero_grad()
        ready.clear()
        staged.copies.clear()
        synchronize(device)
        staged.clock.begin = staged.clock.mark()
        wrapped(inputs[rank]).square().mean().backward()
        synchronize(device)
    apart = distance(gradients(module), wanted).relative
    staged.thread.shutdown()
    read = staged.clock.milliseconds
    buckets = []
    for members, moments in staged.copies:
        out_begin, out_end, back_begin, back_end = map(read, moments)
        indices = [number[member] for member in members]
        buckets.append((indices, (out_begin, out_end), (back_begin, back_end)))
    return Lanes([(index, read(moment)) for index, moment in ready], buckets), apart


def in_order(lanes: Lanes) -> bool:
    """Whether each bucket is copied after its last gradient, and back after that, in turn."""
    when = dict(lanes.ready)
    before = 0.0
    for indices, (out_begin, out_end), (back_begin, back_end) in lanes.buckets:
        last = max(when[index] for index in indices)
        if not last <= out_begin <= out_end <= back_begin <= back_end or out_begin < before:
            return False
        before = out_begin
    return len(when) == sum(len(indices) for indices, _, _ in lanes.buckets)


def overlaps(lanes: Lanes) -> bool:
    """Whether the first copy began before the last gradient was ready."""
    return lanes.buckets[0][1][0] < max(moment for _, moment in lanes.ready)


def draw(lanes: Lanes, width: int = 60) -> str:
    """Both lanes as text, from the begin of forward: o copies out, b back, | gradients."""
    end = max(back[1] for _, _, back in lanes.buckets)
    compute, copies = [" "] * (width + 1), [" "] * (width + 1)
    for _, moment in lanes.ready:
        compute[round(width * moment / end)] = "|"
    for _, out, back in lanes.buckets:
        for letter, (begin, until) in (("o", out), ("b", back)):
            for place in range(round(width * begin / end), round(width * until / end) + 1):
                copies[place] = letter
    return f"computes {''.join(compute)}\ncopies   {''.join(copies)}  {end:.2f} ms"


def find(machine: Machine) -> Iterator[Evidence]:
    group = machine.pair()
    of_ranks = group.run(record)
    lanes = [found[0] for found in of_ranks]
    right = all(apart < 1e-5 for _, apart in of_ranks)
    print(draw(lanes[0]), flush=True)
    ordered, overlapped = all(map(in_order, lanes)), all(map(overlaps, lanes))
    said = f"{len(lanes[0].buckets)} buckets; in order: {ordered}; gradients right: {right}"
    yield Evidence("events: no copy before its gradients", group.label, ordered and right, said)
    hidden = [
        sum(out[1] - out[0] for _, out, _ in one.buckets if out[1] <= max(m for _, m in one.ready))
        / sum(out[1] - out[0] for _, out, _ in one.buckets)
        for one in lanes
    ]
    said = (
        f"share of the time of copies out during backward, by rank: {[round(h, 2) for h in hidden]}"
    )
    yield Evidence("events: copies overlap with backward", group.label, overlapped, said)
