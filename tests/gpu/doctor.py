"""The doctor on a GPU run: a run without a fault is reported as one, and its numbers stay."""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root

from .machine import Machine
from .proofs import CannotProveError, Evidence

LAB = "labs/accumulate_vs_ddp.py"
RANKS = 2


def launched(words: list[str], device: str) -> tuple[int, str]:
    """A script under torchrun on that kind of device: its exit code, and what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, "LABKIT_DEVICE": device, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *torchrun, *words]
    done = run_guarded(command, 300, cwd=project_root(), env=environment)
    return done.returncode, done.stdout


def find(machine: Machine) -> Iterator[Evidence]:
    if importlib.util.find_spec("ddp_doctor") is None:
        raise CannotProveError("this version of the project has no ddp_doctor")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        options = ["--folder", folder, "--json", str(file), "--quiet", "--fail-on", "error"]
        _, alone = launched([LAB], machine.kind)
        code, watched = launched(["-m", "ddp_doctor", *options, LAB], machine.kind)
        report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    tables = [
        [line for line in text.splitlines() if ".weight" in line] for text in (alone, watched)
    ]
    same = tables[0] == tables[1] != []
    on = f"{RANKS} ranks, {'GPUs' if machine.kind == 'cuda' else 'CPU'}"
    said = f"exit code {code}; the lab's numbers unchanged: {same}; a report: {bool(report)}"
    yield Evidence("the doctor watches a lab", on, code == 0 and same and bool(report), said)
