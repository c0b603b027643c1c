"""What the doctor costs: a step with it and without it, in one run.

    python labs/benchmarks/doctor_overhead.py [--rounds 20]

Two ranks, torch's DDP, SGD. Blocks of ten steps with the doctor installed and blocks without it
take turns; the doctor observes every 50th step fully, as it does by default after the first ones.
The table has rank 0's times. The median leaves out the steps that are observed fully; the mean does
not.
"""

# ruff: noqa: E402
import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from labkit.launch.arguments import positive
from labkit.profiling.benchmark_arguments import benchmark_parser


def arguments_of_this_benchmark() -> argparse.Namespace:
    arguments = benchmark_parser(__doc__)
    arguments.add_argument(
        "--rounds", type=positive, default=20, help="pairs of blocks (default 20)"
    )
    return arguments.parse_args()


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    ARGUMENTS = arguments_of_this_benchmark()

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_doctor.observe import install
from ddp_doctor.session import Options, Session
from labkit.book.tables import table
from labkit.launch.ranks import run_ranks
from labkit.profiling.benchmark import write_json

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "12 × Linear(1024)": (
        lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))),
        (16, 1024),
    ),
    "300 × Linear(64)": (
        lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(300))),
        (16, 64),
    ),
    "transformer, 8 layers of 256": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True), 8
        ),
        (4, 32, 256),
    ),
}
BLOCK = 10


def blocks(name: str, rounds: int, block: int) -> tuple[list[float], list[float]]:
    """Seconds of every step: with the doctor, and without."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Options(), Path(folder))
        session.open()
        patches = install(session)
        model = DistributedDataParallel(build())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        inputs = torch.randn(shape)

        def step() -> float:
            begun = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), inputs).backward()
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
    for name in MODELS:
        observed, plain = run_ranks(blocks, 2, name, rounds, block, timeout=900, device="cpu")[0]
        seconds[name] = {"with": observed, "without": plain}
        one, other = statistics.median(observed), statistics.median(plain)
        rows.append([name, 1e3 * other, 1e3 * one, one / other, _mean(observed) / _mean(plain)])
    print(table(["model", "ms without", "ms with", "median ratio", "mean ratio"], rows, digits=3))
    write_json(given.json, {"quick": given.quick, "seconds": seconds})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main(ARGUMENTS)
