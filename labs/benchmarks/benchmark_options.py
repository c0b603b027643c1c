"""The arguments of the scripts in labs/benchmarks, parsed before torch is imported."""

import argparse
from pathlib import Path

from labkit.launch.arguments import explained_by

# The names of `paired_timing.benchmark_models`, which needs torch.
MODELS = ("wide MLP", "600 small tensors", "transformer")


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all benchmarks take."""
    made = explained_by(description)
    made.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes and few repeats: only shows that the code runs",
    )
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the raw numbers to FILE"
    )
    return made


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, which chooses some of `MODELS`; the default is all of them."""
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
