"""Buckets that overlap: the same gradients averaged in seven ways, checked and timed.

Start it with torchrun, on one machine:

    torchrun --standalone --nproc-per-node 4 labs/buckets_that_overlap.py

or on two nodes with four ranks each, with the same line on both nodes:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 \\
        labs/buckets_that_overlap.py

Each rank computes the gradients of its share of one batch. Each variant averages them over the
ranks: the simplest with one all-reduce per parameter after backward, the last with torch's DDP. The
variants take turns, step by step. Rank 0 prints one row per variant:

  all-reduces  the number of all-reduces per step
  first after  the number of gradients that were ready when the first all-reduce was launched; if
               all were, nothing overlapped backward
  full batch   the largest difference from the gradient of one process with the whole batch
  torch DDP    the largest difference from the gradient of torch's DDP
  ranks        the largest difference between ranks
  ms           the median time of a step on rank 0 (forward, backward, average)
  ÷ DDP        the median ratio to the time of torch's DDP in the same turn
  exposed      milliseconds of the last step that rank 0 spent communicating after backward

The differences in "full batch" and "torch DDP" are relative to the largest entry.

--bucket-cap-mb sets the bucket size of the variants with buckets.

The exit code is 1 if a variant differs from the full batch or from torch's DDP by more than
rounding, or if the ranks are not bitwise equal.
"""

import argparse
import copy
import json
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from labkit.launch.arguments import explained_by, parse_arguments, positive

PER_RANK = {"stack": 256, "transformer": 8}  # samples


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of model and data (default 0)")
    parser.add_argument("--model", choices=PER_RANK, default="stack", help="(default stack)")
    parser.add_argument(
        "--samples", type=positive, help="per rank (default 256; 8 with --model transformer)"
    )
    parser.add_argument("--steps", type=positive, default=5, help="timed steps per way (default 5)")
    parser.add_argument(
        "--bucket-cap-mb",
        type=float,
        help="bucket size in MiB (default: torch's, 1 for the first and 25 for the others)",
    )
    parser.add_argument(
        "--gbit",
        type=float,
        help="slow the link down to this many Gbit/s (CPU ranks on one machine)",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="for a timeline and traces of rank 0"
    )
    ARGUMENTS = parse_arguments(parser)

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.launch.lab import join_ranks
from labkit.profiling.recorded_ways import torch_ddp
from labkit.profiling.recording import RankRecording, Recorder, merge
from labkit.profiling.slow_link import SlowLink
from labkit.scenarios.toy_steps import loss_of, small_transformer, stack_of_linears
from labkit.tables import Cell, bitwise_difference, bound, table
from labkit.testing.compare import flatten, gradients
from miniddp import MiniDDP
from miniddp.ladder import (
    Bucketed,
    BucketedOverlapped,
    Flat,
    OverlappedPerParameter,
    PerParameter,
    Rung,
)

Averager = Rung | nn.Module

ROUNDING = 1e-5  # of the largest entry: float32 sums of a few hundred samples in several orders
DDP = "torch DDP"
WARM_UP_STEPS = 3  # torch's DDP rebuilds its buckets after its first step


def ways(cap: float | None) -> dict[str, Callable[[nn.Module, dist.ProcessGroup], Averager]]:
    """By the name of its row: what makes an averager from a module and a process group."""
    return {
        "one all-reduce per parameter": PerParameter,
        "flat": Flat,
        "per parameter, overlapped": OverlappedPerParameter,
        "buckets": partial(Bucketed, bucket_cap_mb=cap),
        "buckets, overlapped": partial(BucketedOverlapped, bucket_cap_mb=cap),
        "MiniDDP": lambda module, group: MiniDDP(module, process_group=group, bucket_cap_mb=cap),
        DDP: partial(torch_ddp, bucket_cap_mb=cap),
    }


class Apart(NamedTuple):
    """The largest differences of one way's gradient, over all ranks."""

    full_batch: float
    ddp: float
    ranks: float

    def is_rounding(self) -> bool:
        return self.full_batch < ROUNDING and self.ddp < ROUNDING and self.ranks == 0


class TimedWay:
    """One way on this rank: its own replica, its averager, and its recorder."""

    def __init__(self, make: Callable[..., Averager], model: nn.Module, link: Any) -> None:
        self.module = copy.deepcopy(model)
        self.recorder = Recorder(self.module, link)
        self.averager = make(self.module, self.recorder)

    def step(self, inputs: Tensor, record: bool = False) -> float:
        """One forward and backward after a barrier; returns its seconds. Not yet run on a GPU."""
        self.module.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        with self.recorder if record else nullcontext():
            loss_of(self.averager(inputs)).backward()
            if isinstance(self.averager, Rung):
                self.averager.finish()
            if inputs.is_cuda:
                torch.cuda.synchronize()
        return time.perf_counter() - begin


def run_all(found: dict[str, TimedWay], inputs: Tensor, steps: int) -> dict[str, list[float]]:
    """Each way's seconds, in turns. One more step of each is recorded afterwards."""
    for way in found.values():
        for _ in range(WARM_UP_STEPS):
            way.step(inputs)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(steps):
        for name, way in found.items():
            seconds[name].append(way.step(inputs))
    for way in found.values():
        way.step(inputs, record=True)
    return seconds


def compare_ways(found: dict[str, TimedWay], truth: Tensor) -> dict[str, Apart]:
    """Compare each way with `truth`, the whole batch's flat gradient; the same on every rank."""
    flat = {name: flatten(gradients(way.module)) for name, way in found.items()}
    largest = truth.abs().max()
    apart = []
    for mine in flat.values():
        first = mine.clone()
        dist.broadcast(first, src=0)
        pairs = ((mine, truth), (mine, flat[DDP]), (mine, first))
        apart.append([float((one - other).abs().max() / largest) for one, other in pairs])
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, apart)
    worst = torch.tensor(of_ranks).amax(dim=0).tolist()
    return {name: Apart(*row) for name, row in zip(found, worst, strict=True)}


def row_of(name: str, way: TimedWay, apart: Apart, seconds: dict[str, list[float]]) -> list[Cell]:
    recorded = way.recorder.recorded
    buckets = recorded.buckets()
    ratios = [mine / ddp for mine, ddp in zip(seconds[name], seconds[DDP], strict=True)]
    return [
        name,
        len(buckets),
        f"{buckets[0].after} of {len(recorded.gradients)}",
        bound(apart.full_batch, ROUNDING),
        bound(apart.ddp, ROUNDING),
        bitwise_difference(apart.ranks),
        median(seconds[name]) * 1e3,
        median(ratios),
        recorded.exposed_seconds() * 1e3,
    ]


def save_timeline(folder: Path, found: dict[str, TimedWay]) -> None:
    """Save one figure of all ways, and one trace per way, as this rank saw them."""
    # Here, because matplotlib takes long to import, and most ranks never draw.
    from labkit.profiling.timeline import draw_together

    folder.mkdir(parents=True, exist_ok=True)
    steps = {name: merge([way.recorder.recorded]) for name, way in found.items()}
    draw_together(steps).savefig(folder / "timeline.png", dpi=160)
    for name, way in found.items():
        trace = {"traceEvents": trace_events(way.recorder.recorded), "displayTimeUnit": "ms"}
        (folder / f"{re.sub('[^a-zA-Z]+', '-', name)}.json").write_text(json.dumps(trace))
    print(f"\nSaved in {folder}: timeline.png, and traces for https://ui.perfetto.dev")


def trace_events(one: RankRecording) -> list[dict[str, Any]]:
    """The step in the Trace Event Format, in microseconds from its begin.

    The rows hold what is computed, the collectives (as many rows as were ever in flight at once:
    viewers draw spans of one row that overlap wrongly), and what is exposed.
    """
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    free_at: list[float] = []

    def span(row: str, name: str, begin: float, end: float, **args: int) -> None:
        when = {"ts": (begin - one.begin) * 1e6, "dur": (end - begin) * 1e6}
        place = {"pid": one.rank, "tid": rows.setdefault(row, len(rows))}
        events.append({"ph": "X", "name": name, "args": args} | place | when)

    for forward in one.forwards:
        span("computes", "forward", *forward)
    span("computes", "backward", one.forwards[-1][1], one.compute_end())
    for gradient in one.gradients:
        span("gradients", f"{gradient.parameter}.grad", gradient.ready, gradient.ready)
    for sent in one.collectives:
        row = next((row for row, at in enumerate(free_at) if at <= sent.launched), len(free_at))
        free_at[row : row + 1] = [sent.done]
        known = {"bytes": sent.bytes, "gradients_ready_at_launch": sent.after}
        span(f"sends {row + 1}", f"{sent.op} {sent.bucket}", sent.launched, sent.done, **known)
    for exposed in one.exposed():
        span("exposed", "exposed", *exposed)
    return events + [
        {"ph": "M", "pid": one.rank, "tid": number, "name": "thread_name", "args": {"name": row}}
        for row, number in rows.items()
    ]


def main(arguments: argparse.Namespace) -> None:
    with join_ranks() as place:
        if arguments.gbit is not None and place.device.type != "cpu":
            raise SystemExit("--gbit slows down a link between CPU ranks; these are on GPUs")
        samples = (arguments.samples or PER_RANK[arguments.model]) * place.world_size
        make = {"stack": stack_of_linears, "transformer": small_transformer}[arguments.model]
        model, batch = make(arguments.seed, samples=samples)
        model, batch = model.to(place.device), batch.to(place.device)
        alone = copy.deepcopy(model)
        loss_of(alone(batch)).backward()
        truth = flatten(gradients(alone))

        link = None if arguments.gbit is None else SlowLink(arguments.gbit)
        makers = ways(arguments.bucket_cap_mb)
        found = {name: TimedWay(make, model, link) for name, make in makers.items()}
        seconds = run_all(found, batch.chunk(place.world_size)[place.rank], arguments.steps)
        apart = compare_ways(found, truth)

        if place.rank == 0:
            headers = ["all-reduces", "first after", "full batch", "torch DDP", "ranks"]
            rows = [row_of(name, found[name], apart[name], seconds) for name in found]
            ranks = f"{place.world_size} ranks"
            print(table([ranks, *headers, "ms", "÷ DDP", "exposed"], rows, digits=2), flush=True)
            if arguments.save:
                save_timeline(arguments.save, found)
        wrong = [name for name in found if not apart[name].is_rounding()]
        if wrong and place.rank == 0:
            print(f"\nNot the gradient of the full batch: {', '.join(wrong)}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main(ARGUMENTS)
