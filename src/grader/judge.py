"""Let nbval judge submissions: write the bench notebook, run nbval over it, read its verdicts.

The bench notebook is the instructor's: one line per check of each submission, with the stored
output "passed". It runs in a trusted kernel, in a folder and a home of its own. Only what nbval
reports as passed counts.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from grader import outcomes
from grader.bench import PASSED, VARIABLE, Cases
from labkit.launch.guard import run_guarded

_START = 120.0  # seconds for pytest and the kernel to start, on a loaded machine
_CELL = 300.0  # seconds that a check may take: its ranks have limits, and so has its author's code
_LOOK_EVERY = 0.05  # seconds
# The guard is a program, too: closing its standard input ends everything below it at once.
_GUARD = run_guarded.__module__

Verdicts = dict[str, dict[str, Any]]


class StoppedError(RuntimeError):
    """The run was asked to stop; what was judged before has been given out."""


def judge(cases: Cases, stop: threading.Event | None = None) -> Iterator[tuple[int, Verdicts]]:
    """For each submission of `cases`, as it is finished: its number, and a verdict per check.

    A verdict is what `Verdict.as_dict` holds, or {"needs_human": why}. "passed" is nbval's word,
    and a verdict that the check itself wrote must agree with it. Raises StoppedError within 0.2 s
    after `stop` is set. Costs about 2 s besides the checks, most of it the start of pytest and of
    the kernel, for all submissions together.
    """
    waiting = list(range(len(cases.submissions)))
    while waiting:
        part = replace(cases, submissions=tuple(cases.submissions[n] for n in waiting))
        finished = 0
        trouble = ""
        with tempfile.TemporaryDirectory(prefix="grader-bench-") as name:
            run = _Run(Path(name), part, stop or threading.Event())
            for verdicts in run.submissions():
                yield waiting[finished], verdicts
                finished += 1
            trouble = run.trouble
        waiting = waiting[finished:]
        if waiting:
            # The kernel ended in the middle of this one; the next ones get another.
            why = trouble or "the checks did not come to an end"
            yield waiting.pop(0), {check.name: {"needs_human": why} for check in cases.checks}


class _Run:
    """One run of nbval over one bench notebook."""

    def __init__(self, folder: Path, cases: Cases, stop: threading.Event) -> None:
        self._folder = folder
        self._checks = [check.name for check in cases.checks]
        self._count = len(cases.submissions)
        self._stop = stop
        self._outcomes = _Lines(folder / "outcomes")
        self._notes = _Lines(folder / "notes")
        self.trouble = ""  # in words what went wrong with the run itself
        cases.write(folder / "cases.json")
        _write_bench(folder / "bench.ipynb", self._count, self._checks)

    def submissions(self) -> Iterator[Verdicts]:
        """The verdicts on each submission in turn, as many as nbval comes to."""
        passed: dict[int, bool] = {}
        noted: dict[tuple[int, str], dict[str, Any]] = {}
        each = len(self._checks)
        done = 0
        for _ in self._while_it_runs():
            passed |= {line["cell"]: line["passed"] for line in self._outcomes.new()}
            for line in self._notes.new():
                noted[line.pop("submission"), line["check"]] = line
            # Cell 0 is the import.
            while done < self._count and all(1 + done * each + k in passed for k in range(each)):
                yield {
                    name: _agreed(noted.get((done, name)), passed[1 + done * each + k])
                    for k, name in enumerate(self._checks)
                }
                done += 1

    def _while_it_runs(self) -> Iterator[None]:
        """Yields as long as nbval runs, and once after it has ended."""
        with (self._folder / "said").open("wb") as said:
            guard = subprocess.Popen(
                [sys.executable, "-m", _GUARD, *self._command()],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._environment(),
            )
        size, since, allowed = 0, time.monotonic(), _START + _CELL
        try:
            while guard.poll() is None:
                if self._stop.wait(_LOOK_EVERY):
                    raise StoppedError
                yield
                now = time.monotonic()
                if self._outcomes.size() != size:
                    size, since, allowed = self._outcomes.size(), now, _CELL + _START
                if now - since > allowed:
                    self.trouble = f"nbval did nothing for {allowed:g} s"
                    return
            if guard.returncode not in (0, 1):
                said = (self._folder / "said").read_text(encoding="utf-8", errors="replace")
                self.trouble = f"nbval ended with {guard.returncode}: {said[-2000:]}"
            yield
        finally:
            guard.stdin.close()
            guard.wait()

    def _command(self) -> list[str]:
        command = [sys.executable, "-P", "-s", "-m", "pytest", "-q", "-p", "nbval.plugin"]
        command += ["-p", outcomes.__name__, "--nbval", "--nbval-current-env", "--tb=no"]
        command += [f"--nbval-cell-timeout={_CELL:g}", "--noconftest", "-p", "no:cacheprovider"]
        return [*command, "-c", os.devnull, "--rootdir", ".", "bench.ipynb"]

    def _environment(self) -> dict[str, str]:
        folder = self._folder
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": str(Path(__file__).parent.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HOME": str(folder),
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTER_PLATFORM_DIRS": "1",
            VARIABLE: str(folder),
            outcomes.VARIABLE: str(folder / "outcomes"),
        }


class _Lines:
    """A file to which somebody else adds lines of JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        """The whole lines that were not there when it was last asked."""
        if self.size() <= self._read:
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _agreed(verdict: dict[str, Any] | None, passed: bool) -> dict[str, Any]:
    if verdict is None:
        return {"needs_human": "the check did not come to an end"}
    if "needs_human" not in verdict and verdict["passed"] is not passed:
        return {"needs_human": f"nbval says {passed}, the check says {verdict['passed']}"}
    return verdict


def _write_bench(path: Path, submissions: int, checks: list[str]) -> None:
    cells = [_cell("from grader.bench import Bench\n\nbench = Bench()", [], 1)]
    for number in range(submissions):
        for name in checks:
            output = {"output_type": "stream", "name": "stdout", "text": f"{PASSED}\n"}
            cells.append(_cell(f"bench.check({number}, {name!r})", [output], len(cells) + 1))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": kernel},
        "cells": cells,
    }
    path.write_text(json.dumps(notebook), encoding="utf-8")


def _cell(source: str, outputs: list[dict[str, Any]], number: int) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": f"cell-{number}",
        "metadata": {},
        "source": source,
        "outputs": outputs,
        "execution_count": number,
    }
