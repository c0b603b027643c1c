"""The cost model compared with measurements, and simulated steps with thousands of ranks.

    python labs/benchmarks/simulated_steps.py [--ranks 2]

1. *The link.* All-reduces are timed: gloo's own and the three of `miniddp.collectives`. α and β
   are fitted to each, and the residual gives the model's error.
2. *The step.* A backward is recorded without communication. Steps with several plans are simulated
   from it and measured in turns, and the error is printed.
3. *Thousands of ranks.* The same backward on other links and with more ranks. These numbers are
   SIMULATED: the network is idle, and no node is slower than the others.
"""

# ruff: noqa: E402
import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from labkit.launch.arguments import positive
from labkit.profiling.benchmark_arguments import benchmark_parser


def arguments_of_this_benchmark() -> argparse.Namespace:
    arguments = benchmark_parser(__doc__)
    arguments.add_argument("--ranks", type=positive, default=2)
    arguments.add_argument("--rounds", type=positive, default=15, help="turns of each (default 15)")
    return arguments.parse_args()


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    ARGUMENTS = arguments_of_this_benchmark()

import torch.distributed as dist
from torch import nn

from labkit.book.tables import table
from labkit.launch.ranks import run_ranks
from labkit.profiling.benchmark import (
    BenchmarkModel,
    benchmark_models,
    take_turns,
    write_json,
)
from labkit.profiling.cost_model import (
    ALGORITHMS,
    Backward,
    Cost,
    Fit,
    Link,
    Measurement,
    backward_of,
    fit,
    lower_limit,
    measure_all_reduce,
    recursive_doubling,
    ring,
    simulate,
)
from labkit.profiling.recording import Recorder
from labkit.profiling.slow_link import SlowLink
from miniddp.buckets import MIB, ParameterSize, Plan, arrival_plan, bucket_caps
from miniddp.collectives import (
    naive_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_reduce,
)
from miniddp.ddp import MiniDDP
from miniddp.extras.planner import LinkCost, measured_plan
from miniddp.ladder import Flat

SIZES = [4096, 64 * 1024, MIB, 4 * MIB, 16 * MIB]
COLLECTIVES: dict[str, Callable[..., object]] = {
    "gloo": dist.all_reduce,
    "naive": naive_all_reduce,
    "ring": ring_all_reduce,
    "recursive doubling": recursive_doubling_all_reduce,
}
LINKS = {"loopback": None, "1gbit": 1.0}
CAPS = {"MiniDDP": None, "MiniDDP, 4 MiB": 4, "MiniDDP, 1 MiB": 1}
CLUSTERS = (8, 64, 1024, 8192)


def time_collectives(sizes: list[int]) -> dict[str, list[Measurement]]:
    return {
        name: measure_all_reduce(sizes, all_reduce, name)
        for name, all_reduce in COLLECTIVES.items()
    }


def in_order(backward: Backward, caps: float | None) -> Plan:
    """The plan of these caps, by places in the order of arrival."""
    sizes = [ParameterSize(nbytes, "all") for nbytes in backward.bytes]
    return arrival_plan(sizes, range(len(sizes)), bucket_caps(caps))


def time_steps(
    rank: int, model: BenchmarkModel, gbit_per_s: float | None, sizes: list[int], rounds: int
) -> dict[str, Any]:
    """On each rank: the link's times, a recorded backward, and measured steps."""
    link = SlowLink(gbit_per_s) if gbit_per_s else dist.group.WORLD
    inputs = model.inputs(rank)
    measured = measure_all_reduce(sizes, algorithm="ring" if gbit_per_s else "gloo", group=link)
    module = model.module()
    recorder = Recorder(module, link)
    flat = Flat(module, recorder)

    def flat_step() -> None:
        flat(inputs).square().mean().backward()
        flat.finish()

    backward = median_backward(recorder, flat_step, module, rounds)
    wrapped = {
        name: MiniDDP(model.module(), process_group=link, bucket_cap_mb=cap)
        for name, cap in CAPS.items()
    }

    def clear() -> None:
        for one in (module, *wrapped.values()):
            one.zero_grad()

    programs: dict[str, Callable[[], object]] = {
        name: lambda one=one: one(inputs).square().mean().backward()
        for name, one in wrapped.items()
    }
    programs["Flat"] = flat_step
    take_turns(programs, 3, clear)
    return {
        "all-reduces": measured,
        "backward": backward,
        "seconds": take_turns(programs, rounds, clear),
    }


def median_backward(
    recorder: Recorder, step: Callable[[], None], module: nn.Module, rounds: int
) -> Backward:
    """When each gradient is ready: the median of `rounds` recorded steps. Closes the recorder."""
    backwards = []
    for _ in range(3 + rounds):
        with recorder:
            step()
        module.zero_grad()
        backwards.append(backward_of(recorder.gather()))
    recorder.close()
    ready = zip(*(one.ready for one in backwards[3:]), strict=True)
    return Backward(tuple(map(statistics.median, ready)), backwards[0].bytes)


class Compared(NamedTuple):
    """One contender's step, in ms, and the simulation's error, in percent."""

    name: str
    simulated: float
    measured: float
    error: float


def compare_with_simulation(cell: dict[str, Any]) -> tuple[Fit, list[Compared]]:
    """The link's fit, and the simulated and measured step of each contender."""
    backward: Backward = cell["backward"]
    fitted = fit(cell["all-reduces"])
    cost = ALGORITHMS[cell["all-reduces"][0].algorithm]
    ranks = cell["all-reduces"][0].world_size
    rows = []
    for name, taken in cell["seconds"].items():
        flat = [list(range(len(backward.ready)))]
        plan = in_order(backward, CAPS[name]) if name in CAPS else flat
        step = simulate(
            backward, plan, lambda n: fitted.link.seconds(cost(ranks, n)), fitted.cpu_share
        )
        measured = statistics.median(taken)
        rows.append(Compared(name, 1e3 * step.end, 1e3 * measured, 100 * step.error(measured)))
    return fitted, rows


def beyond(backward: Backward) -> list[list[Any]]:
    """Simulated steps in ms, by ring and by doubling, with torch's caps and a planned one."""
    sizes = [ParameterSize(nbytes, "all") for nbytes in backward.bytes]
    rows = []
    for gbit, latency in ((10, 20), (100, 5)):
        for ranks in CLUSTERS:
            row: list[Any] = [f"{gbit} Gbit/s, {latency} µs", ranks]
            limits = []
            for algorithm in (ring, recursive_doubling):
                seconds = partial(_seconds, Link.of(gbit, latency), algorithm, ranks)
                link = LinkCost(seconds(0), seconds(1) - seconds(0))
                planned = measured_plan(sizes, [backward.ready], link, bucket_caps())
                for plan in (in_order(backward, None), planned):
                    row.append(1e3 * simulate(backward, plan, seconds).end)
                limits.append(1e3 * lower_limit(backward, seconds))
            rows.append([*row, min(limits)])
    return rows


def _seconds(link: Link, algorithm: Callable[..., Cost], ranks: int, nbytes: float) -> float:
    return link.seconds(algorithm(ranks, nbytes))


def as_dicts(cell: dict[str, Any]) -> dict[str, Any]:
    """What `time_steps` returned, for JSON."""
    all_reduces = [measured._asdict() for measured in cell["all-reduces"]]
    return cell | {"all-reduces": all_reduces, "backward": cell["backward"]._asdict()}


def main(given: argparse.Namespace) -> None:
    sizes, rounds = (SIZES[:3], 2) if given.quick else (SIZES, given.rounds)

    collectives = run_ranks(time_collectives, given.ranks, sizes, timeout=300, device="cpu")[0]
    rows = []
    for name, measured in collectives.items():
        fitted = fit(measured)
        alpha, beta = fitted.link
        rows.append([name, 1e6 * alpha, 8e-9 / beta if beta else "-", 100 * fitted.worst()])
    print(f"all-reduces of {given.ranks} ranks over loopback, fitted")
    print(table(["", "α, µs a step", "1/β, Gbit/s", "worst residual, %"], rows, digits=1))

    cells: dict[str, dict[str, Any]] = {}
    for name, model in benchmark_models(given.quick).items():
        for link, gbit in LINKS.items():
            cell = run_ranks(
                time_steps, given.ranks, model, gbit, sizes, rounds, timeout=600, device="cpu"
            )[0]
            fitted, steps = compare_with_simulation(cell)
            cells[f"{name}, {given.ranks} ranks, {link}"] = {
                **as_dicts(cell),
                "steps": [step._asdict() for step in steps],
            }
            print(
                f"\n{name}, {given.ranks} ranks, {link}; of an all-reduce's time "
                f"{100 * fitted.cpu_share:.0f} % is the processor's"
            )
            print(table(["", "simulated ms", "measured ms", "error, %"], steps, digits=1))
            if (name, link) == ("transformer", "1gbit"):
                rows = beyond(cell["backward"])

    headers = ["link", "ranks", "ring", "ring, planned", "doubling", "doubling, planned", "limit"]
    print("\nSIMULATED: a step of the transformer in ms, on links and with ranks that are not here")
    print(table(headers, rows, digits=0))
    figures = {
        "collectives": {name: [m._asdict() for m in ms] for name, ms in collectives.items()},
        "cells": cells,
        "simulated": [dict(zip(headers, row, strict=True)) for row in rows],
    }
    write_json(given.json, figures)


if __name__ == "__main__":
    main(ARGUMENTS)
