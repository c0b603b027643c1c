"""Is communication hidden behind backward? One step as torch's profiler saw it, of three wrappers.

A gradient is ready when the kernels end that were launched before its hook ran (on a CPU, when its
hook runs). An all-reduce over
gloo is what the host did, with its copies from and to the GPU; one over NCCL is its kernel. An
all-reduce that has ended before the last gradient is ready was hidden. The control is a rung of the
ladder that communicates after backward: none of its all-reduces may be hidden.

Of several steps, which the wrappers take in turns, the one of median length is kept, and the report
stores those of MiniDDP and torch's DDP.
"""

import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.profiling.recording import Collective, Gradient, RankRecording, Recording, merge
from miniddp import MiniDDP
from miniddp.ladder import Bucketed, Rung

from .machine import CannotProveError, Evidence, Machine

TURNS, WARM_UP = 5, 3
ITEMSIZE = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2}
WRAPPERS: dict[str, Callable[..., Any]] = {
    "MiniDDP": MiniDDP,
    "torch DDP": DistributedDataParallel,
    "Bucketed": Bucketed,
}
Event = dict[str, Any]


def layers_of(device: torch.device) -> tuple[int, int, float]:
    """Width, rows of a batch, and cap in MiB: one bucket per layer, and comparable times."""
    return (2048, 32768, 16.0) if device.type == "cuda" else (256, 256, 0.25)


def profiled(rank: int, device: torch.device) -> dict[str, RankRecording]:
    """On each rank: by wrapper, its step of median length on rank 0."""
    width, rows, cap = layers_of(device)
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)]).to(device)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rank)).to(device)
    ways = {}
    for name, wrap in WRAPPERS.items():
        own = copy.deepcopy(module)
        mark_gradients(own)  # before the wrapper's hooks
        ways[name] = wrap(own, bucket_cap_mb=cap)
        for _ in range(WARM_UP):
            step(ways[name], x)
    seen: dict[str, list[RankRecording]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, wrapped in ways.items():
            seen[name].append(profile_step(wrapped, x, rank))
    lengths = [{name: [one.end - one.begin for one in steps] for name, steps in seen.items()}]
    dist.broadcast_object_list(lengths)
    middle = {name: sorted(times)[TURNS // 2] for name, times in lengths[0].items()}
    return {name: steps[lengths[0][name].index(middle[name])] for name, steps in seen.items()}


def mark_gradients(module: nn.Module) -> None:
    """Let each gradient's hook leave a mark in the profile."""
    for name, parameter in module.named_parameters():

        def mark(_: Any, name: str = name) -> None:
            with record_function(f"gradient {name}"):
                pass

        parameter.register_post_accumulate_grad_hook(mark)


def step(wrapped: Any, x: torch.Tensor) -> None:
    with record_function("forward"):
        loss = wrapped(x).square().mean()
    with record_function("backward"):
        loss.backward()
        if isinstance(wrapped, Rung):
            wrapped.finish()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def profile_step(wrapped: Any, x: torch.Tensor, rank: int) -> RankRecording:
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * x.is_cuda
    wrapped.module.zero_grad()
    dist.barrier()
    with profile(activities=kinds, record_shapes=True) as profiler:
        step(wrapped, x)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    sizes = {f"gradient {n}": p.nbytes for n, p in wrapped.module.named_parameters()}
    return recording_of(trace, sizes, rank, on_gpu=x.is_cuda)


# From a trace to a recording ----------------------------------------------------------------------


class Work(NamedTuple):
    """A kernel: when the host launched it, and when it ran; in seconds."""

    launched: float
    begin: float
    end: float


def recording_of(
    trace: dict[str, Any], sizes: dict[str, int], rank: int, on_gpu: bool
) -> RankRecording:
    """One step from the trace that torch's profiler exports; `sizes` are the gradients' bytes."""
    # Times are µs after a moment that may differ between processes.
    base = trace.get("baseTimeNanoseconds", 0) / 1e9
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    for event in events:
        event["begin"] = base + event["ts"] / 1e6
        event["end"] = event["begin"] + event["dur"] / 1e6
    events.sort(key=lambda event: event["begin"])
    marks = {e["name"]: e for e in events if e.get("cat") == "user_annotation"}
    works = works_of(events, on_gpu)
    forward = [w for w in works if w.launched < marks["backward"]["begin"]]
    gradients = sorted(
        (
            Gradient(
                *(name.removeprefix("gradient "), nbytes),
                ready_at(works, marks[name]["begin"]) if on_gpu else marks[name]["begin"],
            )
            for name, nbytes in sizes.items()
        ),
        key=lambda one: one.ready,
    )
    sent = all_reduces(events)
    collectives = tuple(
        Collective(
            *("all_reduce", bytes_of(event)),
            sum(gradient.ready <= event["begin"] for gradient in gradients),
            *(number, event["begin"], done),
        )
        for number, (event, done) in enumerate(sent)
    )
    begin = marks["forward"]["begin"]
    ends = [works[-1].end, gradients[-1].ready, *(one.done for one in collectives)]
    return RankRecording(
        *(rank, begin, max(ends)),
        ((forward[0].begin, max(work.end for work in forward)),),
        *(tuple(gradients), collectives),
    )


def works_of(events: list[Event], on_gpu: bool) -> list[Work]:
    """What computes, in the order of its launch: kernels without NCCL's; on a CPU, operations."""
    if not on_gpu:
        return [Work(e["begin"], e["begin"], e["end"]) for e in events if e.get("cat") == "cpu_op"]
    launched = {
        event["args"].get("correlation"): event["begin"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    kernels = [e for e in events if e.get("cat") == "kernel" and "nccl" not in e["name"].lower()]
    if not kernels:
        raise CannotProveError("the profiler saw no kernels: may this user read CUPTI's counters?")
    return sorted(
        Work(launched.get(e["args"].get("correlation"), e["begin"]), e["begin"], e["end"])
        for e in kernels
    )


def ready_at(works: list[Work], hooked: float) -> float:
    """When everything had run that was launched before a hook."""
    return max((work.end for work in works if work.launched < hooked), default=hooked)


def all_reduces(events: list[Event]) -> list[tuple[Event, float]]:
    """The host's event of each all-reduce, and when it ended."""
    of_host = [
        event
        for event in events
        if event.get("cat") in ("user_annotation", "cpu_op")
        and event["name"] in ("gloo:all_reduce", "nccl:all_reduce")
    ]
    if not of_host:
        raise CannotProveError("the profiler saw no all-reduce")
    kernels = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()]
    if kernels:  # NCCL's run in the order of their launch
        return [(host, kernel["end"]) for host, kernel in zip(of_host, kernels, strict=False)]
    return [(host, host["end"]) for host in of_host]


def bytes_of(event: Event) -> int:
    """The size of a collective's input, from the shapes that the profiler noted; 0 if unknown."""
    args = event.get("args", {})
    sizes = [math.prod(shape) for shape in args.get("Input Dims", []) if shape]
    kinds = [ITEMSIZE.get(kind, 0) for kind in args.get("Input type", [])]
    return sum(size * kind for size, kind in zip(sizes, kinds, strict=False))


# What it proves -----------------------------------------------------------------------------------


def hidden(recording: RankRecording) -> int:
    """How many all-reduces had ended before the last gradient was ready."""
    return sum(one.done < recording.compute_end() for one in recording.collectives)


def find(machine: Machine) -> Iterator[Evidence]:
    group = machine.pair()
    of_ranks = group.run(profiled)
    steps: dict[str, Recording] = {
        name: merge([of_rank[name] for of_rank in of_ranks]) for name in WRAPPERS
    }
    machine.timelines.update({name: steps[name] for name in ("MiniDDP", "torch DDP")})
    for name, both in steps.items():
        counts = [f"{hidden(one)} of {len(one.collectives)}" for one in both.ranks]
        least = min(hidden(one) for one in both.ranks)
        most = max(hidden(one) for one in both.ranks)
        holds = most == 0 if name == "Bucketed" else least > 0
        step_ms = 1e3 * (both.ranks[0].end - both.ranks[0].begin)
        exposed = 1e3 * both.ranks[0].exposed_seconds()
        said = f"hidden by rank: {', '.join(counts)}; rank 0: {step_ms:.1f} ms, "
        said += f"of it exposed {exposed:.1f}"
        control = " (the control: none may be)" if name == "Bucketed" else ""
        # On a CPU, other processes decide what ends first.
        yield Evidence(name + control, group.label, holds or machine.kind == "cpu", said)
