"""Let nbval judge submissions: write the bench notebook, run nbval over it, read its verdicts.

The bench notebook is the instructor's: one line per check of each submission, with the stored
output "passed". It runs in a trusted kernel, in a folder and a home of its own. Only what nbval
reports as passed counts.
"""

import json
import math
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

import psutil

from grader import outcomes
from grader.bench import KERNEL, PASSED, VARIABLE, Cases
from grader.check import GraderError
from labkit.launch.guard import run_guarded

_START = 120.0  # seconds for pytest and the kernel to start, on a loaded machine
_CELL = 300.0  # seconds that a check may take: its ranks have limits, and so has its author's code
_LOOK_EVERY = 0.05  # seconds
_LAST_WORDS = 5.0  # seconds for nbval to end, once its kernel has
_STARTS = 3  # of a kernel, before the machine is taken to be at fault
_IMPORT = 0  # the number of the bench notebook's first cell
# The guard is a program, too: closing its standard input ends everything below it at once.
_GUARD = run_guarded.__module__

Verdicts = dict[str, dict[str, Any]]


class StoppedError(RuntimeError):
    """The run was asked to stop; what was judged before has been given out."""


def judge(cases: Cases, stop: threading.Event | None = None) -> Iterator[tuple[int, Verdicts]]:
    """Each submission of `cases` as it is finished: its number, and a verdict per check run on it.

    A verdict is what `Verdict.as_dict` holds, or {"needs_human": why}. "passed" is nbval's word,
    and a verdict that the check itself wrote must agree with it. Raises StoppedError within 0.2 s
    after `stop` is set, and GraderError if the kernel fails to start three times in a row. Costs
    about 2 s besides the checks, most of it the start of pytest and of the kernel, for all
    submissions together.
    """
    waiting = list(range(len(cases.submissions)))
    failed_starts = 0
    while waiting:
        part = replace(cases, submissions=tuple(cases.submissions[n] for n in waiting))
        finished = 0
        with tempfile.TemporaryDirectory(prefix="grader-bench-") as name:
            run = _Run(Path(name), part, stop or threading.Event())
            for verdicts in run.submissions():
                yield waiting[finished], verdicts
                finished += 1
        waiting = waiting[finished:]
        # A kernel that never began says nothing of any submission.
        failed_starts = 0 if run.began else failed_starts + 1
        if failed_starts == _STARTS:
            raise GraderError(f"the grader's own kernel did not start: {run.trouble}")
        # One that ended within a submission leaves this one open; the next ones get another.
        if waiting and run.began and not run.kernel_ended:
            why = run.trouble or "the checks did not come to an end"
            checks = cases.submissions[waiting[0]].seeds
            yield waiting.pop(0), {name: {"needs_human": why} for name in checks}


class _Run:
    """One run of nbval over one bench notebook."""

    def __init__(self, folder: Path, cases: Cases, stop: threading.Event) -> None:
        self._folder = folder
        self._checks = [list(case.seeds) for case in cases.submissions]
        self._count = len(cases.submissions)
        self._stop = stop
        self._outcomes = _Lines(folder / "outcomes")
        self._notes = _Lines(folder / "notes")
        self._passed: dict[int, bool] = {}  # what nbval says, by the number of the cell
        self._noted: dict[tuple[int, str], dict[str, Any]] = {}  # by submission and check
        self.trouble = ""  # in words what went wrong with the run itself
        self.began = True  # whether the kernel got as far as the first check
        self.kernel_ended = False  # before the last check: no later one can have a verdict
        cases.write(folder / "cases.json")
        _write_bench(folder / "bench.ipynb", self._checks)

    def submissions(self) -> Iterator[Verdicts]:
        """The verdicts on each submission in turn, as many as the kernel comes to."""
        done = 0
        for _ in self._while_it_runs():
            self._passed |= {line["cell"]: line["passed"] for line in self._outcomes.new()}
            for line in self._notes.new():
                self._noted[line.pop("submission"), line["check"]] = line
            self.began = self._passed.get(_IMPORT, True)
            while self.began and done < self._count and self._all_told(done):
                yield self._verdicts(done)
                done += 1
        if not self.began:
            lines = self._said().splitlines() or ["nbval said nothing"]
            self.trouble = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        elif self.kernel_ended and done < self._count:
            yield self._verdicts(done)

    def _cells(self, submission: int) -> range:
        first = _IMPORT + 1 + sum(map(len, self._checks[:submission]))
        return range(first, first + len(self._checks[submission]))

    def _all_told(self, submission: int) -> bool:
        return all(cell in self._passed for cell in self._cells(submission))

    def _verdicts(self, submission: int) -> Verdicts:
        return {
            name: _agreed(self._noted.get((submission, name)), self._passed.get(cell))
            for name, cell in zip(self._checks[submission], self._cells(submission), strict=True)
        }

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
        gone = math.inf  # since when there is no kernel
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
                # nbval would wait for a dead kernel's answer until the cell's time is over.
                gone = min(gone, now) if self._kernel_is_gone() else math.inf
                if now - gone > _LAST_WORDS:
                    self.kernel_ended = True
                    return
            if guard.returncode not in (0, 1):
                self.trouble = f"nbval ended with {guard.returncode}: {self._said()}"
            yield
        finally:
            guard.stdin.close()
            guard.wait()

    def _kernel_is_gone(self) -> bool:
        """Whether the kernel has ended: after its last check, or before."""
        written = self._folder / KERNEL
        if not written.exists():
            return False
        try:
            return psutil.Process(int(written.read_text())).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _said(self) -> str:
        """The end of what nbval printed."""
        said = (self._folder / "said").read_text(encoding="utf-8", errors="replace")
        return said.strip()[-2000:]

    def _command(self) -> list[str]:
        command = [sys.executable, "-P", "-s", "-m", "pytest", "-q", "-p", "nbval.plugin"]
        command += ["-p", outcomes.__name__, "--nbval", "--nbval-current-env", "--tb=no"]
        command += [f"--nbval-cell-timeout={_CELL:g}", "--noconftest", "-p", "no:cacheprovider"]
        return [*command, "-c", os.devnull, "--rootdir", ".", "bench.ipynb"]

    def _environment(self) -> dict[str, str]:
        folder = self._folder
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "COLUMNS": "500",  # pytest cuts the reason of an error to a line
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


def _agreed(verdict: dict[str, Any] | None, passed: bool | None) -> dict[str, Any]:
    if verdict is None or passed is None:
        return {"needs_human": "the check did not come to an end"}
    if "needs_human" not in verdict and verdict["passed"] is not passed:
        return {"needs_human": f"nbval says {passed}, the check says {verdict['passed']}"}
    return verdict


def _write_bench(path: Path, checks: list[list[str]]) -> None:
    cells = [_cell("from grader.bench import Bench\n\nbench = Bench()", [], 1)]
    for number, names in enumerate(checks):
        for name in names:
            output = {"output_type": "stream", "name": "stdout", "text": f"{PASSED}\n"}
            source = f"bench.print_verdict({number}, {name!r})"
            cells.append(_cell(source, [output], len(cells) + 1))
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
