"""For prove_it.ipynb: certify a script, and the figure of the three properties.

The command starts a new interpreter. Here each process is a fork of one that has loaded
torch: the same certificate in less time.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ddp_doctor.certificate import program
from ddp_doctor.certificate.forks import Forks
from labkit.book import figures
from labkit.launch.forks import forked

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
    certificate = program.measure(command, folder, 2, False, Forks)
    report = program.report_with_rules(command, folder, certificate, 2, False, Forks)
    text = certificate.as_text(80) + "\n"
    text += report.as_text(80) if report.run.ranks else ""
    caller.send((certificate.verdict, certificate.why, text))


def run_test(text: str) -> str:
    """What pytest prints of test_gradients.py: without folder, seconds, and colors."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_gradients.py").write_text(text)
        options = ["--quiet", "--tb=line", "-rN"]
        options += ["-p", "no:cacheprovider", "-c", os.devnull]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "test_gradients.py"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    printed = done.stdout.replace(f"{os.path.realpath(folder)}/", "")
    return re.sub(r" in [\d.]+s( \(.*\))?|\x1b\[\d+m", "", printed)


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
