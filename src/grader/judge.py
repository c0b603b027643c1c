"""Let nbval judge: a notebook with one cell per check, which has stored what the key printed.

nbval executes it in a kernel that never runs a line of a student's. A cell prints what the ranks
of a submission returned in one check, and nbval compares.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from grader.sandbox import StoppedError
from labkit.launch.guard import run_guarded

_LONGEST = 300  # seconds that nbval may take
_LOOK_EVERY = 0.1  # seconds
_NOTEBOOK, _PRINTED, _VERDICTS, _SAID = "bench.ipynb", "printed.json", "verdicts.xml", "said"
_NUMBER = re.compile(r"Cell (\d+)$")
# The guard is a program, too: closing its standard input ends everything below it at once.
_GUARD = run_guarded.__module__
_FIRST_CELL = f"import json\n\nprinted = json.load(open({_PRINTED!r}))"


def judge(
    expected: list[str], printed: list[str], stop: threading.Event
) -> tuple[dict[int, bool], str]:
    """Whether nbval finds `expected[n]` where cell n prints `printed[n]`; and what it said.

    A verdict is missing where nbval failed. Raises StoppedError soon after `stop` is set. Costs
    2.5 s of processor time.
    """
    with tempfile.TemporaryDirectory(prefix="grader-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _write_notebook(folder, expected, printed)
        guard = _start_nbval(folder)
        try:
            end = time.monotonic() + _LONGEST
            while guard.poll() is None and time.monotonic() < end:
                if stop.wait(_LOOK_EVERY):
                    raise StoppedError
        finally:
            guard.stdin.close()
            guard.wait()
        said = (folder / _SAID).read_text(encoding="utf-8", errors="replace")
        return _verdicts(folder / _VERDICTS), said.strip()[-1000:]


def _verdicts(path: Path) -> dict[int, bool]:
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    numbers = [_NUMBER.search(case.get("name", "")) for case in cases]
    passed = [all(one.tag == "system-out" for one in case) for case in cases]
    # The notebook's first cell is no check.
    found = {int(n[1]) - 1: right for n, right in zip(numbers, passed, strict=True) if n}
    return {n: right for n, right in found.items() if n >= 0}


def _start_nbval(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "nbval.plugin", "--nbval"]
    command += ["-p", "labkit.launch.kernels"]  # a port could be taken by another program
    command += ["--nbval-current-env", f"--nbval-cell-timeout={_LONGEST}", "--tb=short"]
    command += [f"--nbval-kernel-startup-timeout={_LONGEST}"]
    command += ["--noconftest", "-p", "no:cacheprovider", f"--junitxml={_VERDICTS}"]
    command += ["-c", os.devnull, "--rootdir", ".", _NOTEBOOK]
    with (folder / _SAID).open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", _GUARD, *command],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "PYTHONPATH": str(Path(__file__).parent.parent),
                "PYTHONSAFEPATH": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "HOME": str(folder),
                "IPYTHONDIR": str(folder / "ipython"),
                "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
                "JUPYTER_PLATFORM_DIRS": "1",
            },
        )


def _write_notebook(folder: Path, expected: list[str], printed: list[str]) -> None:
    (folder / _PRINTED).write_text(json.dumps([_encodable(text) for text in printed]))
    cells = [new_code_cell(_FIRST_CELL)]
    for number, text in enumerate(expected):
        output = new_output("stream", text=f"{_encodable(text)}\n")
        own = {"outputs": [output], "execution_count": number + 2}
        cells.append(new_code_cell(f"print(printed[{number}])", **own))
    nbformat.write(new_notebook(cells=cells), folder / _NOTEBOOK)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()
