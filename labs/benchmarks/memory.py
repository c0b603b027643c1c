"""The memory that averaging needs: gradients and buckets, and the peak of the rebuild.

    python labs/benchmarks/memory.py [--model "wide MLP"]

After a backward, the distinct storages of all gradients and buckets are counted, in bytes, and
divided by the bytes of the parameters. With 2.00, each gradient has a copy in a bucket. With 1.00,
each gradient is a view of its bucket. A communication hook gives access to the buckets, in
torch's DDP and in our drop-in.

On Linux, the growth of the process is measured, too. It is the peak of its resident memory in the
step that rebuilds the buckets and in a later step, minus its memory before wrapping, divided by
the parameters' bytes. This includes activations, which are small: the batch is one sample.
"""

# ruff: noqa: E402
import argparse
import re
from collections.abc import Callable
from pathlib import Path

from labkit.profiling.benchmark_arguments import add_models, benchmark_parser


def arguments_of_this_benchmark() -> argparse.Namespace:
    arguments = benchmark_parser(__doc__)
    add_models(arguments)
    return arguments.parse_args()


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    ARGUMENTS = arguments_of_this_benchmark()

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labkit.book.tables import table
from labkit.launch.ranks import run_ranks
from labkit.profiling.benchmark import (
    BenchmarkModel,
    benchmark_models,
    write_json,
)
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch DDP": DistributedDataParallel,
    "torch DDP, views": lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
    "MiniDDP": DropIn,
    "MiniDDP, views": lambda m: DropIn(m, gradient_as_bucket_view=True),
}
STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """The bytes of each distinct storage."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def resident(what: str) -> int:
    """VmRSS, or VmHWM (the peak since `forget_peak`), in bytes."""
    return 1024 * int(re.search(rf"{what}:\s+(\d+) kB", STATUS.read_text())[1])


def forget_peak() -> None:
    REFS.write_text("5")


def count(model: BenchmarkModel, name: str, observed: bool) -> dict[str, float]:
    """Measure on each rank: the buckets with `observed`, otherwise the process."""
    module = model.module()
    inputs = torch.randn(1, *model.shape[1:])
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    weigh = not observed and REFS.exists()
    before = resident("VmRSS") if weigh else 0
    wrapped = WRAPPERS[name](module)
    buffers: list[Tensor] = []

    def hook(state, bucket):  # torch wants no annotations here, or its own
        buffers.append(bucket.buffer())
        done = Future()
        done.set_result(bucket.buffer())
        return done

    if observed:
        wrapped.register_comm_hook(None, hook)
    peaks = []
    for _ in range(4):
        buffers.clear()
        module.zero_grad()
        if weigh:
            forget_peak()
        wrapped(inputs).square().mean().backward()
        if weigh:
            peaks.append((resident("VmHWM") - before) / parameters)
    if observed:
        held = storages([*buffers, *(parameter.grad for parameter in module.parameters())])
        return {"steady": sum(held.values()) / parameters}
    return {"rebuild": peaks[1], "later": peaks[3]} if weigh else {}


def main(given: argparse.Namespace) -> None:
    cells: dict[str, dict[str, float]] = {}
    for name in given.model:
        model = benchmark_models(given.quick)[name]
        for wrapper in WRAPPERS:
            cell = cells[f"{name}, {wrapper}"] = {}
            for observed in (True, False):
                ranks = run_ranks(count, 2, model, wrapper, observed, device="cpu")
                for figure in ranks[0]:
                    cell[figure] = max(rank[figure] for rank in ranks)
    columns = ("steady", "rebuild", "later")
    print("bytes ÷ parameter bytes; the peaks are those of the process")
    print(
        table(
            ["", "gradients + buckets", "peak of the rebuild", "peak of a later step"],
            [[name, *(cell.get(c, "") for c in columns)] for name, cell in cells.items()],
            digits=2,
        )
    )
    write_json(given.json, {"cells": cells})


if __name__ == "__main__":
    main(ARGUMENTS)
