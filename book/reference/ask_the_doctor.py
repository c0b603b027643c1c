"""For ask_the_doctor.ipynb: run a script with the doctor, and print the report."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from labkit.launch import project_root

DOCTOR = "from ddp_doctor.__main__ import main\nmain()\n"


def ask_the_doctor(script: str, ranks: int = 2, *options: str) -> None:
    """Run a script on that many ranks with the doctor, and print the report."""
    done, _ = _run(script, ranks, *options)
    report = re.search(r"─{9}.*─{9}\n", done.stderr, re.DOTALL)
    print(report[0] if report else done.stderr, end="")
    print("exit code", done.returncode)


def findings_in(script: str, ranks: int = 2) -> list[str]:
    """The codes of the errors and warnings about a script, sorted."""
    _, report = _run(script, ranks)
    found = [one for one in report["findings"] if one["severity"] != "note"]
    return sorted(one["code"] for one in found)


def _run(
    script: str, ranks: int, *options: str
) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script)
        Path(folder, "doctor.py").write_text(DOCTOR)  # what `-m ddp_doctor` runs
        torchrun = ["-m", "labkit.launch.nodes", "--nodes", "1"]
        torchrun += ["--nproc-per-node", str(ranks)]
        command = [sys.executable, *(torchrun if ranks > 1 else [])]
        sources = str(project_root() / "src")
        done = subprocess.run(
            [*command, "doctor.py", "--json", "report.json", *options, "train.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=900,
            env=os.environ
            | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        )
        return done, json.loads(Path(folder, "report.json").read_text())
