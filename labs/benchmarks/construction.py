"""The time to wrap a module: MiniDDP and torch's DDP.

    python labs/benchmarks/construction.py [--ranks 2] [--rounds 20]

Wrapping verifies that all ranks hold the same model, broadcasts rank 0's weights, and creates the
buckets. Each turn wraps a new module; building the module is not timed.
"""

# ruff: noqa: E402
import argparse
import statistics
from collections.abc import Callable

from labkit.launch.arguments import positive
from labkit.profiling.benchmark_arguments import benchmark_parser


def arguments_of_this_benchmark() -> argparse.Namespace:
    arguments = benchmark_parser(__doc__)
    arguments.add_argument("--ranks", type=positive, default=2)
    arguments.add_argument("--rounds", type=positive, default=20, help="turns of each (default 20)")
    return arguments.parse_args()


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    ARGUMENTS = arguments_of_this_benchmark()

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.book.tables import table
from labkit.launch.ranks import run_ranks
from labkit.profiling.benchmark import (
    BenchmarkModel,
    benchmark_models,
    paired_ratio,
    take_turns,
    write_json,
)
from miniddp.ddp import MiniDDP

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch DDP": DistributedDataParallel,
    "MiniDDP": MiniDDP,
}


def wrap_in_turns(model: BenchmarkModel, rounds: int) -> dict[str, list[float]]:
    """The seconds of each wrapping, on each rank."""
    new: list[nn.Module] = []
    wrapped: list[nn.Module] = []

    def renew() -> None:
        wrapped.clear()
        new[:] = [model.module()]

    programs = {
        name: lambda wrap=wrap: wrapped.append(wrap(new[0])) for name, wrap in WRAPPERS.items()
    }
    renew()
    take_turns(programs, 1, renew)
    return take_turns(programs, rounds, renew)


def main(given: argparse.Namespace) -> None:
    rounds = 2 if given.quick else given.rounds

    cells = {}
    for name, model in benchmark_models(given.quick).items():
        ranks = run_ranks(wrap_in_turns, given.ranks, model, rounds, timeout=600, device="cpu")
        cells[name] = ranks[0]
    rows = [
        [
            name,
            *(1e3 * statistics.median(seconds[wrapper]) for wrapper in WRAPPERS),
            paired_ratio(seconds["MiniDDP"], seconds["torch DDP"]),
        ]
        for name, seconds in cells.items()
    ]
    print(f"to wrap a module on {given.ranks} ranks, medians in ms")
    print(table(["", *WRAPPERS, "ratio"], rows, digits=2))
    write_json(given.json, {"ranks": given.ranks, "cells": cells})


if __name__ == "__main__":
    main(ARGUMENTS)
