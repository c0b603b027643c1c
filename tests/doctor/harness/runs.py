"""Run the scripts of a corpus, with and without the doctor, and compare."""

import contextlib
import json
import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest import mock

from doctor.harness.ranks import FINGERPRINT, Job, supervise
from doctor.harness.scripts import Script

from labkit.launch.forks import ForkServer

SOURCES = Path(__file__).resolve().parents[3] / "src"
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
}
# The time a run took is printed by some frameworks, and is never the same twice.
TIMES = re.compile(r"('\w*(?:runtime|per_second)': )'[^']*'")
FRAMEWORKS = ("pytorch_lightning", "lightning", "accelerate", "transformers")


@dataclass
class Outcome:
    """What one run left behind."""

    codes: list[int]
    lines: Counter[str]
    steps: Counter[str]
    seconds: float
    errors: str
    report: dict[str, Any] | None

    def differences(self, other: Self) -> str:
        """What is not the same, in words; empty if everything is."""
        found = []
        if self.codes != other.codes:
            found.append(f"exit codes {self.codes} and {other.codes}")
        if self.lines != other.lines:
            found.append(f"lines {list(self.lines - other.lines)} {list(other.lines - self.lines)}")
        if self.steps != other.steps:
            found.append("parameters after a step")
        return "; ".join(found)


class Server:
    """Runs scripts in forks of a process with torch and the modules that are asked for."""

    def __init__(self, *modules: str) -> None:
        self._server = ForkServer(*modules)

    def __enter__(self) -> Self:
        with mock.patch.dict(os.environ, QUIET), self._server.forked(_nothing):
            pass  # the modules read these variables while they are loaded, which is now
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def run(
        self, script: Script, doctor: bool, timeout: float = 300.0, options: tuple[str, ...] = ()
    ) -> Outcome:
        """Run a script once. With the doctor, wait for its report."""
        with tempfile.TemporaryDirectory(prefix="doctor-") as name:
            scratch = Path(name)
            path = scratch / f"{script.name}.py"
            path.write_text(script.text)
            report = scratch / "report.json"
            given = ("--json", str(report), "--folder", str(scratch / "ddp-doctor"), *options)
            if "--json" in options:
                report = Path(options[options.index("--json") + 1])
            job = Job(
                path,
                script.ranks,
                script.launch,
                given if doctor else None,
                report,
                scratch / "run",
                timeout,
                _environment(),
            )
            with self._server.forked(supervise, job) as connection:
                codes, seconds = connection.recv()
            return _outcome(job, codes, seconds)


def _environment() -> dict[str, str]:
    """This process's, and where a script's own processes find their fingerprints."""
    inherited = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    paths = os.pathsep.join([str(FINGERPRINT), str(SOURCES)])
    return inherited | QUIET | {"PYTHONPATH": paths}


def _nothing(caller: Connection) -> None:
    pass


def frameworks_of(scripts: list[str]) -> tuple[str, ...]:
    """The frameworks that any of the scripts imports."""
    text = "\n".join(scripts)
    wanted = [name for name in FRAMEWORKS if re.search(rf"^\s*(import|from) {name}\b", text, re.M)]
    return tuple(wanted)


def _outcome(job: Job, codes: list[int], seconds: float) -> Outcome:
    lines = Counter(TIMES.sub(r"\1time", _text(job.folder, "out")).splitlines())
    steps = Counter(path.read_text() for path in (job.folder / "steps").glob("*.steps"))
    report = None
    with contextlib.suppress(OSError, ValueError):
        report = json.loads(job.report.read_text())
    return Outcome(codes, lines, steps, seconds, _text(job.folder, "err"), report)


def _text(folder: Path, name: str) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob(f"{name}.*")))
