"""Run the scripts of a corpus, with and without the doctor, and compare."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from doctor.corpus_scripts import Script

HERE = Path(__file__).resolve().parent
# The time a run took is printed by some frameworks, and is never the same twice.
TIMES = re.compile(r"('\w*(?:runtime|per_second)': )'[^']*'")
FRAMEWORKS = ("pytorch_lightning", "lightning", "accelerate", "transformers")


@dataclass
class Outcome:
    """What one run left behind. Two runs are the same if codes, lines and steps are."""

    codes: list[int]
    lines: Counter[str]
    steps: Counter[str]
    seconds: float
    errors: str
    report: dict[str, Any] | None = None

    def same(self, other: Self) -> bool:
        ours, theirs = (self.codes, self.lines, self.steps), (other.codes, other.lines, other.steps)
        return ours == theirs

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


@dataclass
class Server:
    """A rank server: one process with torch and the frameworks that are asked for."""

    modules: tuple[str, ...] = ()
    process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Self:
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        environment |= {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "0",
        }
        environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_server.py"), *self.modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()  # no rank is running: there is nothing to wait for
        self.process.wait()

    def run(
        self, script: Script, doctor: bool, timeout: float = 60.0, options: tuple[str, ...] = ()
    ) -> Outcome:
        """Run a script once. With the doctor, wait for its report."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        scratch = Path(tempfile.mkdtemp(prefix="doctor-"))
        target = scratch / "report.json"
        path = scratch / f"{script.name}.py"
        path.write_text(script.text)
        given = ["--json", str(target), "--folder", str(scratch / "ddp-doctor"), *options]
        request = {
            "script": str(path),
            "ranks": script.ranks,
            "launch": script.launch,
            "doctor": given if doctor else None,
            "scratch": str(scratch / "run"),
            "timeout": timeout,
        }
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
            outcome = _outcome(scratch / "run", answer)
            if doctor:
                outcome.report = _wait_for_json(target)
                outcome.errors = _text(scratch / "run", "err")
            return outcome
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def frameworks_of(scripts: list[str]) -> tuple[str, ...]:
    """The frameworks that any of the scripts imports."""
    text = "\n".join(scripts)
    wanted = [name for name in FRAMEWORKS if re.search(rf"^\s*(import|from) {name}\b", text, re.M)]
    return tuple(wanted)


def _outcome(folder: Path, answer: dict[str, Any]) -> Outcome:
    lines = Counter(TIMES.sub(r"\1time", _text(folder, "out")).splitlines())
    steps = Counter(path.read_text() for path in (folder / "steps").glob("*.steps"))
    errors = _text(folder, "err")
    return Outcome(answer["codes"], lines, steps, answer["seconds"], errors)


def _text(folder: Path, name: str) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob(f"{name}.*")))


def _wait_for_json(path: Path, seconds: float = 12.0) -> dict[str, Any] | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError):
            time.sleep(0.05)
    return None
