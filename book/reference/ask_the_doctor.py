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
from labkit.launch.nodes import run_warm

DOCTOR = "from ddp_doctor.__main__ import main\nmain()\n"


def ask_the_doctor(script: str, ranks: int | None = 2, *options: str) -> None:
    """Run a script with the doctor under torchrun, and print the report.

    None runs it with plain `python`: a script that starts its own ranks.
    """
    done, _ = _run(script, ranks, *options)
    report = re.search(r"─{9}.*─{9}\n", done.stderr, re.DOTALL)
    print(report[0] if report else done.stderr, end="")
    print("exit code", done.returncode)


def findings_in(script: str, ranks: int = 2) -> tuple[list[str], int, list[int]]:
    """The codes of the errors and warnings about a script, sorted; the number of its
    optimizer steps; and the numbers of backward passes per step that it has had.
    """
    _, report = _run(script, ranks)
    found = [one for one in report["findings"] if one["severity"] != "note"]
    backwards = report["measured"].get("backwards", {}).get("backwards", [])
    return sorted(one["code"] for one in found), report["steps"]["taken"], backwards


def _run(
    script: str, ranks: int | None, *options: str
) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script)
        Path(folder, "doctor.py").write_text(DOCTOR)  # what `-m ddp_doctor` runs
        command = ["doctor.py", "--json", "report.json", *options, "train.py"]
        env = os.environ | {
            "PYTHONPATH": str(project_root() / "src"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "80",
        }
        if ranks is None:
            command = [sys.executable, *command]
            texts = {"capture_output": True, "text": True}
            done = subprocess.run(command, cwd=folder, timeout=900, env=env, **texts)
        else:
            command = [f"--nproc-per-node={ranks}", *command]
            # The report is written by a process that outlives the ranks.
            done = run_warm(command, 900, Path(folder), env, linger=120)
        return done, json.loads(Path(folder, "report.json").read_text())
