"""For prove_it.ipynb: certify a script, and the figure of the three properties.

The command starts new interpreters. Here each process is a fork of one that has loaded
torch: the same certificate in a tenth of the time.
"""

import atexit
import multiprocessing.process
import os
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ddp_doctor.certificate import child, program
from ddp_doctor.certificate.plan import Part
from labkit.book import figures
from labkit.launch.forks import forked, start_forked, stop_forked

PANELS = {  # name: (samples of each rank, samples on the other side)
    "P1: the number of ranks": ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3, 4, 5, 6]]),
    "P2: the deal": ([[1, 2, 3], [4, 5, 6]], [[5, 1, 4], [2, 6, 3]]),
    "P3: copies": ([[1, 2, 3], [1, 2, 3]], [[1, 2, 3]]),
}


class Proof(NamedTuple):
    """What `python -m ddp_doctor --certify --ranks 2 train.py` says."""

    verdict: str
    why: str
    text: str


def prove(script: str) -> Proof:
    """Write a script to train.py and certify it with two ranks."""
    with (
        tempfile.TemporaryDirectory() as folder,
        forked(_prove, script, Path(folder)) as connection,
    ):
        return Proof(*connection.recv())


def _prove(caller: Connection, script: str, folder: Path) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    os.chdir(folder)
    Path("train.py").write_text(script)
    command = ["train.py"]
    certificate = program.measure(command, folder, 2, False, ForkedStart)
    report = program.explained(command, folder, certificate, 2, False, ForkedStart)
    text = certificate.as_text(80) + "\n"
    text += report.as_text(80) if report.run.ranks else ""
    caller.send((certificate.verdict, certificate.why, text))


class ForkedStart(program.Start):
    """Processes that need not import torch."""

    def process(
        self, part: Part, command: Any, environment: dict[str, str], at: int
    ) -> "Process":
        output = self.output / f"{at}.txt"
        environment = self.environment(part, environment)
        return Process(
            start_forked(_run, list(command), stdout=output, environment=environment)
        )


class Process:
    """What `Start` asks of a `subprocess.Popen`."""

    def __init__(self, started: BaseProcess) -> None:
        self.started = started
        self.pid = started.pid

    @property
    def returncode(self) -> int | None:
        return self.started.exitcode

    def poll(self) -> int | None:
        return self.started.exitcode

    def wait(self) -> None:
        stop_forked(self.started)


def _run(command: list[str]) -> None:
    import torch

    atexit._clear()
    multiprocessing.process._parent_process = None
    sys.path.insert(0, "")
    torch.set_num_threads(1)
    sys.argv = ["child", *command]
    child.main()


def three_properties() -> Figure:
    """Who gets which of six samples on both sides of each comparison."""
    figure, axes = plt.subplots(3, 1, figsize=(6.4, 4.2))
    for axis, (name, (ranks, others)) in zip(axes, PANELS.items(), strict=True):
        axis.set_title(name)
        _column(axis, 1.4, ranks, [f"rank {rank}" for rank in range(len(ranks))])
        axis.text(5.3, 0.5, "=", fontsize=18, ha="center", va="center")
        names = ["one process"] if len(others) == 1 else ["rank 0", "rank 1"]
        _column(axis, 9.0, others, names)
        axis.set(xlim=(-0.6, 15), ylim=(-0.5, 1.5), xticks=[], yticks=[])
        axis.axis("off")
    return figure


def _column(
    axis: plt.Axes, left: float, rows: Sequence[Sequence[int]], names: Sequence[str]
) -> None:
    for at, (samples, name) in enumerate(zip(rows, names, strict=True)):
        height = 0.5 if len(rows) == 1 else 1 - at
        axis.text(left - 0.2, height, name, ha="right", va="center")
        for column, sample in enumerate(samples):
            color = figures.RANKS[sample > 3]
            box = plt.Rectangle((left + column, height - 0.4), 0.9, 0.8, color=color)
            axis.add_patch(box)
            axis.text(
                left + column + 0.45,
                height,
                str(sample),
                color="black" if sample > 3 else "white",
                ha="center",
                va="center",
            )
