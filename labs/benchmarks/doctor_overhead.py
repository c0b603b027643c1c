"""What the doctor costs: a step with it and without it, in one run.

    python labs/benchmarks/doctor_overhead.py [--rounds 20]

Two ranks, torch's DDP, SGD. Blocks of ten steps with the doctor installed and blocks without it
take turns; the doctor observes every 50th step fully, as it does by default after the first ones.
The table has rank 0's times. The median leaves out the steps that are observed fully; the mean does
not.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmark_options import benchmark_parser
from labkit.launch.arguments import positive

if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    arguments = benchmark_parser(__doc__)
    arguments.add_argument(
        "--rounds", type=positive, default=20, help="pairs of blocks (default 20)"
    )
    ARGUMENTS = arguments.parse_args()

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_doctor.observe.install import install
from ddp_doctor.observe.session import Session
from ddp_doctor.options import Options
from labkit.launch.ranks import run_ranks
from labkit.tables import table
from paired_timing import BenchmarkModel, benchmark_models, write_json

BLOCK = 10


def with_small_inputs(model: BenchmarkModel) -> BenchmarkModel:
    """16 samples per rank, or 4 sequences of 32: less to compute, so that what is added shows."""
    width = model.shape[-1]
    return model._replace(shape=(16, width) if len(model.shape) == 2 else (4, 32, width))


def blocks(
    rank: int, model: BenchmarkModel, rounds: int, block: int
) -> tuple[list[float], list[float]]:
    """Seconds of every step: with the doctor, and without."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Options(), Path(folder))
        session.open()
        patches = install(session)
        ddp = DistributedDataParallel(model.module())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
        inputs = model.inputs(rank)

        def step() -> float:
            begun = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), inputs).backward()
            optimizer.step()
            return time.perf_counter() - begun

        for _ in range(session.options.first + 2):
            step()
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            times[0].extend(step() for _ in range(block))
            patches.undo()
            times[1].extend(step() for _ in range(block))
            patches = install(session)
        patches.undo()
        session.over = True
    return times


def main(given: argparse.Namespace) -> None:
    rounds, block = (1, 1) if given.quick else (given.rounds, BLOCK)
    rows, seconds = [], {}
    for name, model in benchmark_models(given.quick).items():
        small = with_small_inputs(model)
        observed, plain = run_ranks(blocks, 2, small, rounds, block, timeout=900, device="cpu")[0]
        seconds[name] = {"with": observed, "without": plain}
        one, other = statistics.median(observed), statistics.median(plain)
        means = statistics.mean(observed) / statistics.mean(plain)
        rows.append([name, 1e3 * other, 1e3 * one, one / other, means])
    print(table(["model", "ms without", "ms with", "median ratio", "mean ratio"], rows, digits=3))
    write_json(given.json, {"quick": given.quick, "seconds": seconds})


if __name__ == "__main__":
    main(ARGUMENTS)
