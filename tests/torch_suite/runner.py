"""Runs the tests, each in a fork of this process, which has loaded torch (`labkit.launch.forks`).

A fresh start costs a rank three seconds of import; a fork costs milliseconds. The parent has run
no torch operation and no thread, so that the children inherit nothing but modules. At the timeout,
a test and its ranks are killed.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import resource
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from labkit.launch.forks import start_forked, stop_forked
from labkit.launch.guard import adopt_orphans, die_with_parent, kill_descendants

from . import replaced
from .replaced import Constructions

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
    detail: str = ""
    """the failure, the reason of the skip, or the last lines that the ranks printed"""


@dataclasses.dataclass
class _Running:
    case: type[unittest.TestCase]
    method: str
    process: BaseProcess
    started: float
    folder: tempfile.TemporaryDirectory


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
    target: torch.device | None = replaced.CPU,
) -> list[Result]:
    """Run the tests, `jobs` at a time; `report` is called as each one ends.

    On `target` (`replaced`), or where they put themselves if it is None.
    """
    adopt_orphans()
    waiting = list(chosen)[::-1]  # the next one is taken from the end
    waiting.sort(key=lambda test: test[1] == _LONGEST)
    running: list[_Running] = []
    results: list[Result] = []
    lost_races: Counter[str] = Counter()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(*waiting.pop(), target))
        time.sleep(0.02)
        for test in list(running):
            late = time.monotonic() > test.started + timeout
            if late or not test.process.is_alive():
                running.remove(test)
                result = _finish(test)
                if any(race in result.detail for race in _RACES) and lost_races[result.name] < 3:
                    lost_races[result.name] += 1
                    waiting.append((test.case, test.method))
                    continue
                results.append(result)
                report(result)
    kill_descendants()
    return results


def name_of(case: type[unittest.TestCase], method: str) -> str:
    return f"{case.__module__}.{case.__name__}.{method}"


def _start(case: type[unittest.TestCase], method: str, target: torch.device | None) -> _Running:
    folder = tempfile.TemporaryDirectory(prefix="torch_suite_", ignore_cleanup_errors=True)
    output = Path(folder.name, "output")
    process = start_forked(_run_here, case, method, folder.name, target, stdout=output)
    return _Running(case, method, process, time.monotonic(), folder)


def _run_here(
    case: type[unittest.TestCase], method: str, folder: str, target: torch.device | None
) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TEMP_DIR"] = tempfile.tempdir = folder
    os.environ["INIT_METHOD"] = f"file://{folder}/init"
    os.makedirs(os.path.join(folder, "barrier"))
    Constructions.path = os.path.join(folder, "constructed")
    if method == _LONGEST and target == replaced.CPU:
        replaced.smaller_models(getattr(case, method))
    if "compile" in method:  # otherwise each rank would import it
        importlib.import_module("torch._inductor.compile_fx")
    outcome = unittest.TestResult()
    if target is not None:
        replaced.in_every_thread(target)
    with replaced.OnTarget(target) if target is not None else contextlib.nullcontext():
        unittest.TestSuite([case(method)]).run(outcome)
    bad = [text for _, text in (*outcome.errors, *outcome.failures)]
    skipped = [reason for _, reason in outcome.skipped]
    result = {
        "outcome": "failed" if bad else "skipped" if skipped else "passed",
        "detail": "\n".join(bad or skipped),
    }
    Path(folder, "result").write_text(json.dumps(result))
    os._exit(0)  # a thread that a test left behind does not end


def _finish(test: _Running) -> Result:
    seconds = time.monotonic() - test.started
    late = test.process.is_alive()
    stop_forked(test.process)
    with test.folder as folder:
        output, file = (Path(folder, name) for name in ("output", "result"))
        if file.exists():
            ended = json.loads(file.read_text())
        else:
            said = output.read_text(errors="replace")[-4000:] if output.exists() else ""
            ended = {"outcome": "timeout" if late else "crashed", "detail": said}
        Constructions.path = os.path.join(folder, "constructed")
        constructed = Constructions.count()
    name = name_of(test.case, test.method)
    return Result(name, seconds=seconds, constructed=constructed, **ended)
