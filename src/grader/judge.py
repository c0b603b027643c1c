"""Let nbval judge one submission: write the bench notebook, run nbval over it, read its verdicts.

The bench notebook is the instructor's: one line a check, with the stored output "passed". It runs
in a trusted kernel, in a folder and a home of its own. Only what nbval reports as passed counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from grader.bench import PASSED, VARIABLE, Case
from labkit.launch.guard import run_guarded

_START = 120.0  # seconds for pytest and the kernel to start, on a loaded machine
_SLACK = 10.0  # seconds that a check takes besides its processes


def judge(case: Case) -> dict[str, dict[str, Any]]:
    """For each check of `case`, by name: what `Verdict.as_dict` holds, or {"needs_human": why}.

    "passed" is nbval's word, and a verdict that the check itself wrote must agree with it.
    Costs about 2 s besides the checks, most of it the start of pytest and of the kernel.
    """
    with tempfile.TemporaryDirectory(prefix="grader-bench-") as name:
        folder = Path(name)
        case.write(folder / "case.json")
        _write_bench(folder / "bench.ipynb", [check.name for check in case.checks])
        # A check starts three groups of processes, each with a limit of its own.
        longest = [check.seconds * 5 * 3 + _SLACK for check in case.checks]
        trouble = _run_nbval(folder, max(longest), sum(longest) + _START)
        outcomes = _read_outcomes(folder / "junit.xml")
        noted = _read_notes(Path(case.verdicts))
    verdicts = {}
    for number, check in enumerate(case.checks, start=1):
        verdict = noted.get(check.name)
        passed = outcomes.get(number)
        if verdict is None:
            verdict = {"needs_human": trouble or "the check did not come to an end"}
        elif "needs_human" not in verdict and verdict["passed"] is not passed:
            verdict = {"needs_human": f"nbval says {passed}, the check says {verdict['passed']}"}
        verdicts[check.name] = verdict
    return verdicts


def _write_bench(path: Path, checks: list[str]) -> None:
    cells = [_cell("from grader.bench import check", [], 1)]
    for number, name in enumerate(checks, start=2):
        output = {"output_type": "stream", "name": "stdout", "text": f"{PASSED}\n"}
        cells.append(_cell(f"check({name!r})", [output], number))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": kernel},
        "cells": cells,
    }
    path.write_text(json.dumps(notebook))


def _cell(source: str, outputs: list[dict[str, Any]], number: int) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": f"cell-{number}",
        "metadata": {},
        "source": source,
        "outputs": outputs,
        "execution_count": number,
    }


def _run_nbval(folder: Path, cell_seconds: float, seconds: float) -> str:
    """Run it; in words what went wrong with the run itself, empty if nothing did."""
    command = [sys.executable, "-P", "-s", "-m", "pytest", "-q", "-p", "nbval.plugin"]
    command += ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={cell_seconds:g}"]
    command += ["--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    command += ["--junitxml=junit.xml", "bench.ipynb"]
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HOME": str(folder),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_PLATFORM_DIRS": "1",
        VARIABLE: str(folder / "case.json"),
    }
    try:
        run = run_guarded(command, seconds, cwd=folder, env=environment)
    except subprocess.TimeoutExpired:
        return f"nbval was still running after {seconds:g} s"
    if run.returncode in (0, 1):
        return ""
    return f"nbval ended with {run.returncode}: {(run.stdout + run.stderr)[-2000:]}"


def _read_outcomes(path: Path) -> dict[int, bool]:
    """By number of the code cell: whether nbval says passed. Skipped is not passed."""
    if not path.exists():
        return {}
    outcomes = {}
    for case in ElementTree.parse(path).iter("testcase"):
        number = int(case.get("name").rpartition(" ")[2])
        outcomes[number] = len(case.findall("*")) == 0
    return outcomes


def _read_notes(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["check"]: line for line in lines}
