"""How long it takes to start and stop fresh ranks: run_ranks beside torch.multiprocessing.spawn.

    python labs/benchmarks/start_ranks.py [--ranks 4] [--repeat 20]

Each call starts new processes, joins them in a gloo group, makes one all-reduce and ends them. The
two are timed in turn, so that a machine that slows down slows both. Prints medians, and the spread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from labkit.ranks import run_ranks
from labkit.tables import table


def all_reduce_once(rank: int) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def spawned(rank: int, ranks: int, meeting_point: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=ranks
    )
    all_reduce_once(rank)
    dist.barrier()
    dist.destroy_process_group()


def spawn(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(spawned, args=(ranks, os.path.join(folder, "meet")), nprocs=ranks)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=20, help="calls of run_ranks (default 20)")
    arguments = parser.parse_args()

    first = seconds(lambda: run_ranks(all_reduce_once, arguments.ranks))
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(arguments.repeat):
        ours.append(seconds(lambda: run_ranks(all_reduce_once, arguments.ranks)))
        if turn % 5 == 0:  # it takes seconds
            theirs.append(seconds(lambda: spawn(arguments.ranks)))

    rows = [
        [name, len(times), statistics.median(times), min(times), max(times)]
        for name, times in (("run_ranks", ours), ("torch.multiprocessing.spawn", theirs))
    ]
    print(f"{arguments.ranks} fresh ranks, seconds a call (the first call took {first:.2f})")
    print(table(["", "calls", "median", "least", "most"], rows, digits=3))


if __name__ == "__main__":
    main()
