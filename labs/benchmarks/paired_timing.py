"""What the scripts in labs/benchmarks share: models, paired timing, and JSON output.

Two programs are compared within one run: they take turns in the same processes. If the machine
slows down for a while, it slows both, and the median *ratio* of the two over all turns hardly
changes. Times from separate runs can differ by more than the effect of interest.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmark_options import MODELS

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # from malloc.h


class BenchmarkModel(NamedTuple):
    """A module, and the shape of one rank's input in a step."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def inputs(self, rank: int) -> Tensor:
        """Inputs that differ between ranks."""
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(rank))

    def module(self) -> nn.Module:
        """A new module; all copies are equal, because they are built with one seed."""
        torch.manual_seed(0)
        return self.build()


def _linears(count: int, width: int) -> nn.Module:
    layers = [nn.Linear(width, width) for _ in range(count)]
    for layer in layers:
        # With the default, each layer shrinks the gradient to 0.58 of it: after 300 it would be
        # denormal, with which some processors compute ten times slower.
        nn.init.xavier_uniform_(layer.weight)
    return nn.Sequential(*layers)


def _transformer(layers: int, width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def benchmark_models(quick: bool = False) -> dict[str, BenchmarkModel]:
    """The three models of all benchmarks, or small ones that only show that the code runs."""
    small = (
        BenchmarkModel(lambda: _linears(3, 64), (4, 64)),
        BenchmarkModel(lambda: _linears(10, 8), (4, 8)),
        BenchmarkModel(lambda: _transformer(1, 16), (2, 4, 16)),
    )
    large = (
        BenchmarkModel(lambda: _linears(12, 1024), (256, 1024)),
        BenchmarkModel(lambda: _linears(300, 64), (512, 64)),
        BenchmarkModel(lambda: _transformer(8, 256), (3, 128, 256)),
    )
    return dict(zip(MODELS, small if quick else large, strict=True))


def take_turns(
    programs: Mapping[str, Callable[[], object]],
    rounds: int,
    after: Callable[[], object],
    seed: int = 0,
    blocks: Sequence[Sequence[str]] = (),
) -> dict[str, list[float]]:
    """Time each of `programs` once per round, in an order that `seed` shuffles in each round.

    `blocks` divides the names into groups; the order of the groups is shuffled, too. The programs
    of a group run one right after another, so that a disturbance of a second affects all of them.

    Every rank must call it with the same names, seed, and blocks. Each rank starts its clock when
    it leaves a barrier, and the slowest rank counts, so all ranks return the same seconds, in the
    order of rounds. `after` runs after each turn and is not timed. A program that returns a float
    reports its own time, in seconds.
    """
    groups = [list(block) for block in blocks or [list(programs)]]
    shuffle = random.Random(seed).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        shuffle(groups)
        for group in groups:
            shuffle(group)
        for name in chain.from_iterable(groups):
            dist.barrier()
            begin = time.perf_counter()
            told = programs[name]()
            taken = told if isinstance(told, float) else time.perf_counter() - begin
            slowest = torch.tensor(taken, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            after()
            seconds[name].append(round(slowest.item(), 6))
    return seconds


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees. Linux with glibc only; elsewhere a no-op.

    By default, glibc returns memory to the system, and a later turn pays for it: each page that it
    touches again costs a page fault, about 1 µs. A step can have none or thousands of them, which
    depends on what ran before it.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 64 << 20)
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds of ours ÷ theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def calm(seconds: Sequence[float]) -> float:
    """The median of the fastest quarter: of a program on a machine that was busy at times."""
    return statistics.median(sorted(seconds)[: max(1, len(seconds) // 4)])


def describe_machine() -> dict[str, Any]:
    """The facts about this machine that a reader of the numbers needs."""
    return {"cores": os.cpu_count(), "threads a rank": 1, "torch": torch.__version__}


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write `results` and the machine's description to `path` as JSON; nothing if `path` is None.

    A list of numbers takes one line, to keep the file readable.
    """
    if path is not None:
        text = json.dumps({"machine": describe_machine(), **results}, indent=1)
        text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
