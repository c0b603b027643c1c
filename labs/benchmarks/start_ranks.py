"""The time to start new ranks: run_ranks, torch.multiprocessing.spawn, and torchrun.

    python labs/benchmarks/start_ranks.py [--ranks 4] [--repeat 20]

Each call starts new processes, joins them in a gloo group, runs one all-reduce, and ends them. The
three take turns, so a slowdown of the machine affects all of them. Prints medians and the spread.
"""

# ruff: noqa: E402
import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

from labkit.launch.arguments import positive
from labkit.profiling.benchmark_arguments import benchmark_parser


def arguments_of_this_benchmark() -> argparse.Namespace:
    arguments = benchmark_parser(__doc__)
    arguments.add_argument("--ranks", type=positive, default=4)
    arguments.add_argument(
        "--repeat", type=positive, default=20, help="calls of run_ranks (default 20)"
    )
    return arguments.parse_args()


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    ARGUMENTS = arguments_of_this_benchmark()

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from labkit.book.tables import table
from labkit.launch.guard import run_guarded
from labkit.launch.lab import join_ranks
from labkit.launch.ranks import run_ranks
from labkit.profiling.benchmark import write_json


def all_reduce_once(rank: int) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def spawned(rank: int, ranks: int, store_file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=ranks)
    all_reduce_once(rank)
    dist.barrier()
    dist.destroy_process_group()


def spawn(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(spawned, args=(ranks, os.path.join(folder, "store")), nprocs=ranks)


def torchrun(ranks: int) -> None:
    """Run this script again, on each rank; see `main`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__]
    done = run_guarded(command, 120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"torchrun ended with exit code {done.returncode}:\n{done.stderr}")


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(given: argparse.Namespace) -> None:
    if "LOCAL_RANK" in os.environ:
        with join_ranks() as place:
            all_reduce_once(place.rank)
        return
    ranks, repeat = (2, 1) if given.quick else (given.ranks, given.repeat)

    first = seconds(lambda: run_ranks(all_reduce_once, ranks))
    taken: dict[str, list[float]] = {
        "run_ranks": [],
        "torch.multiprocessing.spawn": [],
        "torchrun": [],
    }
    for turn in range(repeat):
        taken["run_ranks"].append(seconds(lambda: run_ranks(all_reduce_once, ranks)))
        if turn % 5 == 0:  # they take seconds
            taken["torch.multiprocessing.spawn"].append(seconds(lambda: spawn(ranks)))
            taken["torchrun"].append(seconds(lambda: torchrun(ranks)))

    rows = [
        [name, len(times), statistics.median(times), min(times), max(times)]
        for name, times in taken.items()
    ]
    print(f"{ranks} fresh ranks, seconds per call (the first call took {first:.2f})")
    print(table(["", "calls", "median", "least", "most"], rows, digits=3))
    write_json(given.json, {"ranks": ranks, "first": first, "seconds": taken})


if __name__ == "__main__":
    main(ARGUMENTS)
