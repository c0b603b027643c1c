"""How long a step takes: every rung of the ladder, MiniDDP, the drop-in, and torch's DDP.

    python labs/benchmarks/step_time.py [--model "wide MLP"] [--ranks 2 4] [--link loopback 1gbit]
    python labs/benchmarks/step_time.py --before ../before/src       also MiniDDP of that checkout
    python labs/benchmarks/step_time.py --only MiniDDP drop-in       only these and torch's DDP
    python labs/benchmarks/step_time.py --only fully_shard "torch fully_shard"
    python labs/benchmarks/step_time.py --stored labs/benchmarks/results/step_time.json

The ratio to torch's DDP is the median over the rounds of the two times in a round. On a busy
machine, the *calm* ratio is better: it compares the fastest quarter of the rounds of both.

With `--only`, torch's DDP takes part twice: the ratio of *torch DDP, again* shows the noise, which
can exceed 2 %. Sharded modules take part only if they are named; their steps gather parameters,
too. The contenders are built in a random order, which differs from run to run. With
`--copies 4`, there are four of each, because a wrapper's place in memory affects its speed. A round
goes through the copies in a random order, and through the contenders of each copy in a random
order. A contender's time in a round is the mean over its copies. Each copy gives one ratio to
torch's DDP, the median over the rounds; the table shows the mean of these ± two standard errors.
With few copies, that interval is too narrow: it misses the mean of many copies one time in seven
with four, and one time in twelve with eight.

A step is forward and backward until every gradient is averaged. All contenders run in the same
processes and take turns (`paired_timing`), with one thread per rank. The 1 Gbit/s
link is `labkit.profiling.slow_link`, which adds waiting time to the loopback link. The report also
gives the lower limit for any plan, max(compute, t₁ + C):

- compute: the step of the module alone;
- t₁: when its first gradient is ready;
- C: one all-reduce of all bytes on that link.

torch's DDP runs with its defaults, with gradient views, and with each of several bucket caps. With
`--device cuda` each rank has a GPU of its own, if there are enough, and uses NCCL. A turn then ends
when the GPU is done. There is no slow link. This mode has not been run yet. `--json FILE` adds the
seconds of each cell to FILE and keeps the cells that are already there; `--stored FILE` prints all.
"""

import argparse
import importlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmark_options import add_models, benchmark_parser
from labkit.launch.arguments import positive

LINKS = {"loopback": None, "1gbit": 1.0}
SHARDED = ("fully_shard", "torch fully_shard")


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    arguments = benchmark_parser(__doc__)
    add_models(arguments)
    arguments.add_argument("--ranks", nargs="+", type=positive, default=[2, 4])
    arguments.add_argument("--link", nargs="+", choices=list(LINKS), default=list(LINKS))
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument(
        "--rounds", type=positive, default=15, help="rounds of turns (default 15)"
    )
    arguments.add_argument(
        "--before",
        type=Path,
        metavar="SRC",
        help="the src folder of another checkout: its MiniDDP takes part, too",
    )
    arguments.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="run only these contenders (named as in the table), and torch's DDP twice",
    )
    arguments.add_argument(
        "--copies",
        type=positive,
        default=1,
        help="how many of each contender take turns in each round (default 1)",
    )
    arguments.add_argument(
        "--stored", type=Path, metavar="FILE", help="only print the cells that --json has stored"
    )
    ARGUMENTS = arguments.parse_args()
    if ARGUMENTS.only and ARGUMENTS.json:
        arguments.error("--json stores every contender of a cell: leave out --only, or --json")
    if ARGUMENTS.device == "cuda" and ARGUMENTS.link != ["loopback"]:
        arguments.error("--device cuda needs --link loopback: the slow link is for the CPU only")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.profiling.slow_link import SlowLink
from labkit.tables import table
from miniddp import MiniDDP
from miniddp.ladder import RUNGS
from miniddp.sharded import fully_shard
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from paired_timing import (
    BenchmarkModel,
    benchmark_models,
    calm,
    describe_machine,
    keep_freed_memory,
    paired_ratio,
    take_turns,
    write_json,
)

CAPS = (1, 2, 4, 8, 16)
WARM_UP = 2  # rounds that do not count
REFERENCE = "torch DDP"
CONTROL = "torch DDP, again"
StepProgram = Callable[[], object]
Wrap = Callable[[nn.Module], Any]


def mini_ddp_of(src: Path) -> type[nn.Module]:
    """`MiniDDP` of another checkout's src folder; later imports find the installed one again.

    Raises FileNotFoundError if the folder has no package miniddp.
    """
    if not (src / "miniddp" / "__init__.py").is_file():
        raise FileNotFoundError(f"{src} has no package miniddp: name a checkout's src folder")

    def take_out() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] == "miniddp"]
        return {name: sys.modules.pop(name) for name in names}

    installed = take_out()
    sys.path.insert(0, str(src))
    try:
        return importlib.import_module("miniddp").MiniDDP
    finally:
        sys.path.remove(str(src))
        take_out()
        sys.modules.update(installed)


def shard_layers(how: Callable[..., nn.Module], mesh: DeviceMesh, module: nn.Module) -> nn.Module:
    """Shard each layer, and what remains."""
    for layer in getattr(module, "layers", module):
        how(layer, mesh=mesh)
    return how(module, mesh=mesh)


class Track:
    """What the contenders of a cell share: a model, its inputs on this rank, and a link."""

    def __init__(
        self, rank: int, device: torch.device, model: BenchmarkModel, gbit_per_s: float | None
    ) -> None:
        self.device, self.model = device, model
        self.link = SlowLink(gbit_per_s) if gbit_per_s else dist.group.WORLD
        self.inputs = model.inputs(rank).to(device)
        self.ran: list[nn.Module] = []  # the modules whose gradients are not cleared yet

    def module(self) -> nn.Module:
        return self.model.module().to(self.device)

    def contender(self, wrap: Wrap) -> StepProgram:
        """The step of a wrapped module, after some that do not count."""
        module = self.module()
        averager = wrap(module)

        def step() -> None:
            self.ran.append(module)
            averager(self.inputs).square().mean().backward()
            if hasattr(averager, "finish"):
                averager.finish()
            self.until_done()

        for _ in range(WARM_UP):
            step()
            self.clear()
        return step

    def until_done(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        while self.ran:
            self.ran.pop().zero_grad()


class Alone:
    """What no plan can save: the module's own step, and one all-reduce of all bytes."""

    def __init__(self, track: Track) -> None:
        self.track, self.module = track, track.module()
        self.parameters = list(self.module.parameters())
        elements = sum(parameter.numel() for parameter in self.parameters)
        self.everything = torch.zeros(elements, device=track.device)
        self.arrivals: list[float] = []
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, _: torch.Tensor) -> None:
        if not self.arrivals:
            self.track.until_done()
        self.arrivals.append(time.perf_counter())

    def compute(self) -> None:
        self.track.ran.append(self.module)
        self.arrivals[:] = [0.0]  # the whole step is timed, not its first gradient
        self.module(self.track.inputs).square().mean().backward()
        self.track.until_done()

    def first_gradient(self) -> float:
        self.track.ran.append(self.module)
        self.arrivals.clear()
        begin = time.perf_counter()
        self.module(self.track.inputs).square().mean().backward()
        return self.arrivals[0] - begin

    def all_bytes(self) -> None:
        dist.all_reduce(self.everything, group=self.track.link)
        self.track.until_done()


def wraps_on(track: Track, world_size: int, before: Path | None) -> dict[str, Wrap]:
    """How each contender wraps a module; the control is not there."""
    link = track.link
    torchs = partial(DistributedDataParallel, process_group=link)
    wraps: dict[str, Wrap] = {rung.__name__: partial(rung, group=link) for rung in RUNGS}
    wrappers = {"MiniDDP": MiniDDP, "drop-in": DropIn}
    if before is not None:
        wrappers["MiniDDP before"] = mini_ddp_of(before)
    for name, wrapper in wrappers.items():
        wraps[name] = partial(wrapper, process_group=link)
        wraps[f"{name}, views"] = partial(wraps[name], gradient_as_bucket_view=True)
    mesh = init_device_mesh(track.device.type, (world_size,))
    mesh.get_group = lambda mesh_dim=None: link  # its own group has no delay
    for name, how in zip(SHARDED, (fully_shard, torchs_fully_shard), strict=True):
        wraps[name] = partial(shard_layers, how, mesh)
    wraps |= {REFERENCE: torchs, "torch DDP, views": partial(torchs, gradient_as_bucket_view=True)}
    for cap in CAPS:
        wraps[f"torch DDP, {cap} MiB"] = partial(torchs, bucket_cap_mb=cap)
    return wraps


def chosen(wraps: dict[str, Wrap], only: list[str] | None) -> list[str]:
    """The names that race. With `only`, these and two of torch's: the second one is the control."""
    if only is None:
        return [name for name in wraps if name not in SHARDED]
    wraps[CONTROL] = wraps[REFERENCE]
    wanted = {*only, REFERENCE, CONTROL}
    if unknown := wanted - set(wraps):
        raise ValueError(f"--only names {sorted(unknown)}; the contenders are {list(wraps)}")
    return [name for name in wraps if name in wanted]


def race(
    rank: int,
    world_size: int,
    device: torch.device,
    model: BenchmarkModel,
    gbit_per_s: float | None,
    given: argparse.Namespace,
    seed: int,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Time the contenders with one model on one link. Runs on each rank.

    Returns the cell's raw numbers, and each contender's paired ratios to `REFERENCE`, one per copy.
    """
    keep_freed_memory()
    track = Track(rank, device, model, gbit_per_s)
    wraps = wraps_on(track, world_size, given.before)
    racing = chosen(wraps, given.only)
    steps: dict[str, StepProgram] = {}
    blocks = [["compute"], ["t1"], ["C"]]  # apart: a module is faster right after its own step
    orders = random.Random(seed)
    for copy in range(given.copies):
        # The first contenders get the memory that earlier ones have freed.
        for name in orders.sample(racing, len(racing)):
            steps[f"{name} {copy}"] = track.contender(wraps[name])
        blocks.append([f"{name} {copy}" for name in racing])
    alone = Alone(track)
    steps |= {"compute": alone.compute, "t1": alone.first_gradient, "C": alone.all_bytes}
    take_turns(steps, WARM_UP, track.clear, seed, blocks)
    turns = take_turns(steps, given.rounds, track.clear, seed + 1, blocks)
    seconds, ratios = with_copies_together(turns, racing, given.copies)
    cell = {"parameters": len(alone.parameters), "seconds": seconds}
    return cell, ratios


def with_copies_together(
    turns: dict[str, list[float]], racing: list[str], copies: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """`turns` with the mean over the copies of each contender; and each copy's ratio."""
    copied = {name: [turns.pop(f"{name} {copy}") for copy in range(copies)] for name in racing}
    seconds = {
        name: [round(statistics.mean(turn), 6) for turn in zip(*of_copies, strict=True)]
        for name, of_copies in copied.items()
    }
    ratios = {
        name: [paired_ratio(*pair) for pair in zip(of_copies, copied[REFERENCE], strict=True)]
        for name, of_copies in copied.items()
    }
    return seconds | turns, ratios


def median_limit(seconds: dict[str, list[float]]) -> float:
    """max(compute, t₁ + C), from medians."""
    compute, first, whole = (statistics.median(seconds[name]) for name in ("compute", "t1", "C"))
    return max(compute, first + whole)


def mean_and_error(ratios: list[float]) -> str:
    """The mean of `ratios` ± two standard errors of that mean."""
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{statistics.mean(ratios):.3f} ± {2 * error:.3f}"


def show(name: str, cell: dict[str, Any], ratios: dict[str, list[float]]) -> str:
    """The cell as a table: milliseconds, and ratios to torch's DDP."""
    seconds = cell["seconds"]
    least = median_limit(seconds)
    rows = []
    for contender, taken in seconds.items():
        ratio = f"{paired_ratio(taken, seconds[REFERENCE]):.3f}"
        if len(ratios.get(contender, [])) > 1 and contender != REFERENCE:
            ratio = mean_and_error(ratios[contender])
        median = statistics.median(taken)
        quiet = f"{calm(taken) / calm(seconds[REFERENCE]):.3f}"
        rows.append([contender, 1e3 * median, ratio, quiet, median / least])
    notes = ""
    if set(SHARDED) <= set(seconds):
        ours, torchs = (seconds[name] for name in SHARDED)
        notes = f"\nfully_shard ÷ torch fully_shard: {paired_ratio(ours, torchs):.3f}"
    return (
        f"{name}: {cell['parameters']} tensors; the limit is {1e3 * least:.0f} ms\n"
        + table(["", "median ms", f"÷ {REFERENCE}", "calm", "÷ limit"], rows, digits=2)
        + notes
    )


def main(given: argparse.Namespace) -> None:
    if given.stored is not None:
        for name, cell in json.loads(given.stored.read_text())["cells"].items():
            print(show(name, cell, {}), end="\n\n")
        return
    if given.quick:
        given.rounds = 2
    cells = {}
    if given.json is not None and given.json.exists():
        stored = json.loads(given.json.read_text())
        kind = (stored.get("quick"), stored.get("copies", 1), stored["machine"])
        if kind != (given.quick, given.copies, describe_machine()):
            raise SystemExit(
                f"{given.json} holds cells with other --quick or --copies, or from another "
                "machine; these do not go into one file: choose another"
            )
        cells = stored["cells"]
    on_gpu = ", cuda" if given.device == "cuda" else ""
    for name, ranks, link in itertools.product(given.model, given.ranks, given.link):
        cell = f"{name}, {ranks} ranks, {link}{on_gpu}"
        model, seed = benchmark_models(given.quick)[name], random.randrange(2**32)
        cells[cell], ratios = run_ranks(
            *(race, ranks, model, LINKS[link], given, seed), timeout=3600, device=given.device
        )[0]
        print(show(cell, cells[cell], ratios), end="\n\n", flush=True)
        write_json(given.json, {"quick": given.quick, "copies": given.copies, "cells": cells})


if __name__ == "__main__":
    main(ARGUMENTS)
