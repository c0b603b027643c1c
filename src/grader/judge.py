"""Let nbval judge: write the bench notebook with what the key printed, and read the verdicts."""

import json
import os
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from grader.bench import VARIABLE, expected_text
from grader.known import Known
from labkit.launch.guard import run_guarded

_CELL = 300  # seconds that nbval gives a check
_LOOK_EVERY = 0.1  # seconds
_BENCH, _VERDICTS = "bench.ipynb", "verdicts.xml"
_NUMBER = re.compile(r"Cell (\d+)$")
# The guard is a program, too: closing its standard input ends everything below it at once.
_GUARD = run_guarded.__module__

Verdicts = dict[tuple[int, str], bool]


class StoppedError(Exception):
    """The run was asked to stop."""


def judge(folder: Path, known: Known, count: int, stop: threading.Event) -> tuple[Verdicts, str]:
    """nbval's verdict on each check of `count` submissions, and what it said if some are missing.

    `folder` holds the cases (`grader.bench.write_cases`). A verdict is missing where the grader
    itself failed. Raises StoppedError soon after `stop` is set. Costs about 2 s besides the checks,
    for the start of pytest and of the kernel.
    """
    checks = known.assignment.checks
    cells = [(number, check.name) for number in range(count) for check in checks]
    printed = {check.name: expected_text(check, known.key(check)) for check in checks}
    _write_bench(folder / _BENCH, cells, printed)
    _run_nbval(folder, stop)
    passed = _read_verdicts(folder / _VERDICTS)
    # The notebook's first cell imports.
    verdicts = {cell: passed[n] for n, cell in enumerate(cells, start=1) if n in passed}
    said = (folder / "said").read_text(encoding="utf-8", errors="replace")
    return verdicts, "" if len(verdicts) == len(cells) else said.strip()[-1000:]


def _run_nbval(folder: Path, stop: threading.Event) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "nbval.plugin", "--nbval"]
    command += ["--nbval-current-env", f"--nbval-cell-timeout={_CELL}", "--tb=short"]
    command += ["--noconftest", "-p", "no:cacheprovider", f"--junitxml={_VERDICTS}"]
    command += ["-c", os.devnull, "--rootdir", ".", _BENCH]
    with (folder / "said").open("wb") as said:
        guard = subprocess.Popen(
            [sys.executable, "-m", _GUARD, *command],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environment(folder),
        )
    try:
        while guard.poll() is None:
            if stop.wait(_LOOK_EVERY):
                raise StoppedError
    finally:
        guard.stdin.close()
        guard.wait()


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HOME": str(folder),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_PLATFORM_DIRS": "1",
        VARIABLE: str(folder),
    }


def _read_verdicts(path: Path) -> dict[int, bool]:
    """Whether each cell passed, by its number."""
    found = {}
    if path.exists():
        for case in ElementTree.parse(path).iter("testcase"):
            number = _NUMBER.search(case.get("name", ""))
            if number:
                found[int(number[1])] = not len([one for one in case if one.tag != "system-out"])
    return found


def _write_bench(path: Path, cells: list[tuple[int, str]], printed: dict[str, str]) -> None:
    written = [_cell("from grader.bench import Bench\n\nbench = Bench()", [], 1)]
    for number, name in cells:
        output = {"output_type": "stream", "name": "stdout", "text": f"{printed[name]}\n"}
        source = f"bench.check({number}, {name!r})"
        written.append(_cell(source, [output], len(written) + 1))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}}
    path.write_text(json.dumps(notebook | {"cells": written}), encoding="utf-8")


def _cell(source: str, outputs: list[dict[str, Any]], number: int) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": f"cell-{number}",
        "metadata": {},
        "source": source,
        "outputs": outputs,
        "execution_count": number,
    }
