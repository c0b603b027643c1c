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

from benchmark_options import benchmark_parser
from labkit.launch.arguments import positive


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

from ddp_doctor.observe.install import install
from ddp_doctor.observe.session import Session
from ddp_doctor.options import Options
from labkit.launch.ranks import run_ranks
from labkit.tables import table
from paired_timing import write_json

# How to build it, and the shape of a rank's inputs.
Model = tuple[Callable[[], nn.Module], tuple[int, ...]]
SIZES = ((12, 1024), (300, 64), (8, 256))  # the layers of each model, and their width
QUICK_SIZES = ((3, 64), (10, 8), (1, 16))
BLOCK = 10


def linears(count: int, width: int) -> Model:
    return lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(count))), (16, width)


def transformer(layers: int, width: int) -> Model:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, layers)

    return build, (4, 32, width)


def models(quick: bool) -> dict[str, Model]:
    """By name; with `quick`, small ones that only show that the code runs."""
    wide, deep, encoder = QUICK_SIZES if quick else SIZES
    return {
        f"{wide[0]} × Linear({wide[1]})": linears(*wide),
        f"{deep[0]} × Linear({deep[1]})": linears(*deep),
        f"transformer, {encoder[0]} layers of {encoder[1]}": transformer(*encoder),
    }


def blocks(model: Model, rounds: int, block: int) -> tuple[list[float], list[float]]:
    """Seconds of every step: with the doctor, and without."""
    build, shape = model
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
    for name, model in models(given.quick).items():
        observed, plain = run_ranks(blocks, 2, model, rounds, block, timeout=900, device="cpu")[0]
        seconds[name] = {"with": observed, "without": plain}
        one, other = statistics.median(observed), statistics.median(plain)
        rows.append([name, 1e3 * other, 1e3 * one, one / other, _mean(observed) / _mean(plain)])
    print(table(["model", "ms without", "ms with", "median ratio", "mean ratio"], rows, digits=3))
    write_json(given.json, {"quick": given.quick, "seconds": seconds})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main(ARGUMENTS)
