"""Let nbval judge: a notebook with one cell per check, which has stored what the key printed.

nbval executes it in a kernel that never runs a line of a student's. A cell waits for the text of
its check, which comes from the submission's sandbox, and prints it; nbval compares.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grader.sandbox import StoppedError
from labkit.launch.guard import run_guarded

_CELL = 3600  # seconds that nbval waits for a text
_ENDING = 300.0  # seconds that nbval may take once every text is there
_LOOK_EVERY = 0.1  # seconds
_NOTEBOOK, _VERDICTS, _SAID = "bench.ipynb", "verdicts.xml", "said"
_NUMBER = re.compile(r"Cell (\d+)$")
# The guard is a program, too: closing its standard input ends everything below it at once.
_GUARD = run_guarded.__module__
_FIRST_CELL = """\
import time
from pathlib import Path


def show(number):
    \"\"\"Print what a submission's ranks returned in this check, once it is there.\"\"\"
    while not Path(f"{number}.txt").exists():
        time.sleep(0.02)
    print(Path(f"{number}.txt").read_text("utf-8"))
"""


class Judge:
    """nbval, started on a notebook whose cell n is expected to print `expected[n]`."""

    def __init__(self, folder: Path, guard: subprocess.Popen[bytes], count: int) -> None:
        self._folder, self._guard, self._count = folder, guard, count

    def submit(self, number: int, text: str) -> None:
        """What cell `number` prints."""
        unfinished = self._folder / f"{number}.part"
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        unfinished.rename(self._folder / f"{number}.txt")

    def verdicts(self, stop: threading.Event) -> tuple[dict[int, bool], str]:
        """Whether each cell passed, after all texts are there; and what nbval said otherwise.

        A verdict is missing where nbval failed. Raises StoppedError soon after `stop` is set.
        """
        end = time.monotonic() + _ENDING
        while self._guard.poll() is None and time.monotonic() < end:
            if stop.wait(_LOOK_EVERY):
                raise StoppedError
        found = {}
        path = self._folder / _VERDICTS
        for case in ElementTree.parse(path).iter("testcase") if path.exists() else ():
            if number := _NUMBER.search(case.get("name", "")):
                # The notebook's first cell defines `show`.
                found[int(number[1]) - 1] = all(one.tag == "system-out" for one in case)
        found.pop(-1, None)
        said = (self._folder / _SAID).read_text(encoding="utf-8", errors="replace")
        return found, "" if len(found) == self._count else said.strip()[-1000:]


@contextlib.contextmanager
def judge(expected: list[str]) -> Iterator[Judge]:
    """Start nbval, and end it with all its processes on leaving. Costs 2.5 s of processor time."""
    with tempfile.TemporaryDirectory(prefix="grader-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _write_notebook(folder / _NOTEBOOK, expected)
        guard = _start_nbval(folder)
        try:
            yield Judge(folder, guard, len(expected))
        finally:
            guard.stdin.close()
            guard.wait()


def _start_nbval(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "nbval.plugin", "--nbval"]
    command += ["-p", "labkit.launch.kernels"]  # a port could be taken by another program
    command += ["--nbval-current-env", f"--nbval-cell-timeout={_CELL}", "--tb=short"]
    command += [f"--nbval-kernel-startup-timeout={_CELL}"]
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


def _write_notebook(path: Path, expected: list[str]) -> None:
    cells = [_cell(_FIRST_CELL, [], 1)]
    for number, text in enumerate(expected):
        output = {"output_type": "stream", "name": "stdout", "text": f"{text}\n"}
        cells.append(_cell(f"show({number})", [output], number + 2))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}}
    path.write_text(json.dumps(notebook | {"cells": cells}), encoding="utf-8")


def _cell(source: str, outputs: list[dict[str, Any]], number: int) -> dict[str, Any]:
    own = {"cell_type": "code", "id": f"cell-{number}", "metadata": {}, "execution_count": number}
    return own | {"source": source, "outputs": outputs}
