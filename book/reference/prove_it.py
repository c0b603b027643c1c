"""For prove_it.ipynb: certify a script, and run a test file.

The command and the test start new interpreters. Here each process is a fork of one that
has loaded torch: the same certificate in less time.
"""

import os
import re
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from ddp_doctor.certificate import forks, program
from labkit.launch.forks import OF_THIS_PROCESS, forked
from labkit.launch.popen import run_forked


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
        words = [*options, "test_gradients.py"]
        place = 300, Path(folder), dict(os.environ)
        done = run_forked(OF_THIS_PROCESS, _run_pytest, words, *place)
    printed = done.stdout.replace(f"{os.path.realpath(folder)}/", "")
    return re.sub(r" in [\d.]+s( \(.*\))?|\x1b\[\d+m", "", printed)


def _run_pytest(options: list[str]) -> None:
    import pytest

    sys.exit(pytest.main(options))
