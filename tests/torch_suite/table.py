"""The table of PyTorch's tests: which can run on a CPU, and why the others cannot.

It is what torch's own DDP did in the same harness: a test that it passes, constructing the class,
is runnable, and another class has to pass it. A test that it does not pass here says nothing about
another class; the reason is the error that torch's own DDP met.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

import torch

from .runner import Result

PATH = Path(__file__).with_name("table.json")

_WHY = {
    "test_DistributedDataParallel_non_default_stream": "is about a second CUDA stream",
    "test_ddp_device": "asserts the index of each rank's GPU",
    "test_ddp_logging_data_gpu": "asserts the index of each rank's GPU",
    "test_ddp_has_finalized": "is about NCCL's watchdog, which ends the process",
    "test_ddp_hook_pickling_powerSGD": "loads a pickled hook, which torch.load refuses since 2.6",
    "test_sync_bn_logged": "looks for torch's own SyncBatchNorm, which refuses the CPU",
    "test_ddp_profiling_execution_trace": "asserts NCCL's entries in a trace",
}
"""What the tests that no CPU can pass ask for; the error alone does not always say it."""


_WITHOUT = "passes without constructing the class"


class Table(TypedDict):
    """``table.json``; names are file.Class.method."""

    torch: str
    world_size: int
    runnable: list[str]
    not_runnable: dict[str, str]


def read() -> Table:
    return json.loads(PATH.read_text())


def write(results: Iterable[Result], world_size: int) -> None:
    """Write the table that the results of torch's own DDP amount to."""
    table: Table = {
        "torch": torch.__version__.partition("+")[0],
        "world_size": world_size,
        "runnable": [],
        "not_runnable": {},
    }
    for result in sorted(results, key=lambda result: result.name):
        if result.outcome == "passed" and result.constructed:
            table["runnable"].append(result.name)
        else:
            table["not_runnable"][result.name] = _why(result)
    PATH.write_text(json.dumps(table, indent=1) + "\n")


def _why(result: Result) -> str:
    if result.outcome == "passed":
        return _WITHOUT
    why = _WHY.get(result.name.rpartition(".")[2], "torch's own DDP does not pass it here")
    ended = f"{result.outcome} after {result.seconds:.0f} s"
    return f"{why} ({(result.reason or ended)[:72]})"
