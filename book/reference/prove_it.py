"""For prove_it.ipynb: certify a script, and run a test file.

The command starts a new interpreter. Here each process is a fork of one that has loaded
torch: the same certificate in less time.
"""

import os
import re
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from ddp_doctor.certificate import forks, program
from labkit.launch.forks import forked


class Proof(NamedTuple):
    """What `python -m ddp_doctor --certify --ranks N train.py` says."""

    verdict: str
    why: str
    text: str


def prove(script: str, ranks: int = 2) -> Proof:
    """Write a script to train.py and certify it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        forked(_prove, script, Path(folder), ranks) as connection,
    ):
        return Proof(*connection.recv())


def _prove(caller: Connection, script: str, folder: Path, ranks: int) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    os.chdir(folder)
    Path("train.py").write_text(script)
    command = ["train.py"]
    forks.load()
    certificate = program.measure(command, folder, ranks, False)
    report = program.report_with_rules(command, folder, certificate, ranks, False)
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
