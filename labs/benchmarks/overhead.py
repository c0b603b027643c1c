"""The cost of a hook: the time that a wrapper adds to a step, divided by its parameters.

    python labs/benchmarks/overhead.py [--rounds 200]

With one rank there is nothing to wait for, and 600 tensors of a few hundred bytes are cheap to
copy. What remains is the bookkeeping per gradient and per step. The module alone and the wrappers
take turns; the output shows medians of the paired differences.
"""

# ruff: noqa: E402
import argparse
import statistics
from collections.abc import Callable

from benchmark_options import benchmark_parser
from labkit.launch.arguments import positive


def arguments_of_this_benchmark() -> argparse.Namespace:
    arguments = benchmark_parser(__doc__)
    arguments.add_argument(
        "--rounds", type=positive, default=200, help="turns of each (default 200)"
    )
    return arguments.parse_args()


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    ARGUMENTS = arguments_of_this_benchmark()

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.tables import table
from miniddp import MiniDDP
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from paired_timing import BenchmarkModel, paired_ratio, take_turns, write_json

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the module alone": lambda module: module,
    "torch DDP": DistributedDataParallel,
    "torch DDP, views": lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
    "MiniDDP": MiniDDP,
    "MiniDDP, views": lambda m: MiniDDP(m, gradient_as_bucket_view=True),
    "drop-in": DropIn,
    "drop-in, views": lambda m: DropIn(m, gradient_as_bucket_view=True),
}


def steps(layers: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of each wrapper's steps."""
    model = BenchmarkModel(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))), (2, 8))
    inputs = model.inputs(0)
    wrapped = {name: wrap(model.module()) for name, wrap in WRAPPERS.items()}

    def clear() -> None:
        for module in wrapped.values():
            module.zero_grad()

    programs = {
        name: lambda module=module: module(inputs).sum().backward()
        for name, module in wrapped.items()
    }
    take_turns(programs, 3, clear)  # buckets are rebuilt, memory is touched
    return take_turns(programs, rounds, clear)


def main(given: argparse.Namespace) -> None:
    layers, rounds = (5, 3) if given.quick else (300, given.rounds)

    seconds = run_ranks(steps, 1, layers, rounds, timeout=600, device="cpu")[0]
    alone = seconds["the module alone"]
    rows = [
        [
            name,
            1e3 * statistics.median(taken),
            1e6
            * statistics.median(a - b for a, b in zip(taken, alone, strict=True))
            / (2 * layers),
            paired_ratio(taken, seconds["torch DDP"]),
        ]
        for name, taken in seconds.items()
    ]
    print(f"{2 * layers} tensors, one rank")
    print(table(["", "step, ms", "added, µs a tensor", "÷ torch DDP"], rows, digits=2))
    write_json(given.json, {"parameters": 2 * layers, "seconds": seconds})


if __name__ == "__main__":
    main(ARGUMENTS)
