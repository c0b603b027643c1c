"""Runs the tests, each in a process of its own that is forked from one which has torch loaded.

A fresh start costs a rank three seconds of import; a fork costs milliseconds. The parent has run
no torch operation and no thread, so that the children inherit nothing but modules. A test and its
ranks are one session of processes: at the timeout all of it is killed.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from labkit.launch.guard import die_with_parent

from . import placement
from .swap import Constructions

_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Warning|Interrupt|Timeout)\b")


# Races within the tests themselves, whatever class is tested, that a busy machine loses: the first
# call of distributed autograd may reach a trainer that has not joined the process group; and in
# test_post_localSGD_optimizer_step_reload rank 0 removes the checkpoint without asking whether the
# others have read it. A test that fails so is run again.
_RACES = (
    "Default process group has not been initialized",
    "FileNotFoundError: [Errno 2] No such file or directory",
)


# By far the longest. It starts first, because the last one to start runs alone at the end.
_LONGEST = "test_ddp_uneven_inputs"


@dataclasses.dataclass
class Result:
    """How one test ended."""

    name: str
    """file.Class.method"""
    outcome: str
    """passed, failed, skipped, timeout or crashed"""
    seconds: float
    constructed: int
    """how often the class was constructed, over all ranks"""
    gates: list[str]
    """why PyTorch would have skipped the test on this machine"""
    detail: str = ""
    """the failure, the reason of the skip, or the last lines that the ranks printed"""

    @property
    def reason(self) -> str:
        """The first error that a rank raised, on one line; of a skip or a timeout the last line."""
        lines = [line for line in self.detail.splitlines() if line.strip()]
        errors = [
            f"{line} {following.strip()}" if line.rstrip().endswith((":", "!")) else line
            for line, following in zip(lines, [*lines[1:], ""])  # noqa: B905 (lines may be empty)
            if _ERROR.match(line) and "exited with e" not in line
        ]
        return (errors or lines[-1:] or [""])[0][:200]


@dataclasses.dataclass
class _Running:
    case: type[unittest.TestCase]
    method: str
    pid: int
    started: float
    deadline: float
    folder: str


def fork_ranks() -> None:
    """Make PyTorch's multi-process test classes fork their ranks; they start fresh interpreters."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def _spawn_processes(self: MultiProcessTestCase) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = _spawn_processes
    # If the command is killed, the tests that it runs end, and so do their ranks.
    os.register_at_fork(after_in_child=die_with_parent)


def run(
    chosen: Iterable[tuple[type[unittest.TestCase], str]],
    jobs: int,
    timeout: float,
    report: Callable[[Result], None],
    target: torch.device | None = placement.CPU,
) -> list[Result]:
    """Run the tests, `jobs` at a time; `report` is called as each one ends.

    On `target` (`placement`), or where they put themselves if it is None.
    """
    waiting = list(chosen)[::-1]  # the next one is taken from the end
    waiting.sort(key=lambda test: test[1] == _LONGEST)
    running: list[_Running] = []
    results: list[Result] = []
    lost_races: Counter[str] = Counter()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(*waiting.pop(), timeout, target))
        time.sleep(0.02)
        for test in list(running):
            ended, _ = os.waitpid(test.pid, os.WNOHANG)
            if ended or time.monotonic() > test.deadline:
                running.remove(test)
                result = _finish(test, late=not ended)
                if any(race in result.detail for race in _RACES) and lost_races[result.name] < 3:
                    lost_races[result.name] += 1
                    waiting.append((test.case, test.method))
                    continue
                results.append(result)
                report(result)
    return results


def name_of(case: type[unittest.TestCase], method: str) -> str:
    return f"{case.__module__}.{case.__name__}.{method}"


def _start(
    case: type[unittest.TestCase], method: str, timeout: float, target: torch.device | None
) -> _Running:
    folder = tempfile.mkdtemp(prefix="torch_suite_")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _run_here(case, method, folder, target)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    now = time.monotonic()
    return _Running(case, method, pid, now, now + timeout, folder)


def _run_here(
    case: type[unittest.TestCase], method: str, folder: str, target: torch.device | None
) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.open(os.path.join(folder, "output"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["TEMP_DIR"] = tempfile.tempdir = folder
    os.environ["INIT_METHOD"] = f"file://{folder}/init"
    os.makedirs(os.path.join(folder, "barrier"))
    Constructions.path = os.path.join(folder, "constructed")
    if method == _LONGEST and target == placement.CPU:
        placement.smaller_models(getattr(case, method))
    if "compile" in method:  # otherwise each rank would import it
        importlib.import_module("torch._inductor.compile_fx")
    outcome = unittest.TestResult()
    if target is not None:
        placement.in_every_thread(target)
    with placement.OnTarget(target) if target is not None else contextlib.nullcontext():
        unittest.TestSuite([case(method)]).run(outcome)
    bad = [text for _, text in (*outcome.errors, *outcome.failures)]
    skipped = [reason for _, reason in outcome.skipped]
    result = {
        "outcome": "failed" if bad else "skipped" if skipped else "passed",
        "detail": "\n".join(bad or skipped),
    }
    with open(os.path.join(folder, "result"), "w") as file:
        json.dump(result, file)


def _finish(test: _Running, late: bool) -> Result:
    seconds = time.monotonic() - test.started
    with contextlib.suppress(ProcessLookupError):
        os.killpg(test.pid, signal.SIGKILL)
    if late:
        os.waitpid(test.pid, 0)
    ended: dict[str, Any] = {"outcome": "timeout" if late else "crashed"}
    with contextlib.suppress(FileNotFoundError), open(os.path.join(test.folder, "result")) as file:
        ended = json.load(file)
    if ended["outcome"] in ("timeout", "crashed"):
        with open(os.path.join(test.folder, "output"), errors="replace") as file:
            ended["detail"] = file.read()[-4000:]
    Constructions.path = os.path.join(test.folder, "constructed")
    constructed = Constructions.count()
    shutil.rmtree(test.folder, ignore_errors=True)
    gates = getattr(getattr(test.case, test.method), "gates", [])
    return Result(
        name_of(test.case, test.method),
        seconds=seconds,
        constructed=constructed,
        gates=gates,
        **ended,
    )
