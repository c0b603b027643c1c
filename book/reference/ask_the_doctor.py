"""For ask_the_doctor.ipynb: run a script with the doctor, and print the report."""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.launch import project_root
from labkit.launch.nodes import as_script, run_warm, server_with
from labkit.launch.popen import run_forked

# What a plain script finds loaded: it is one that uses Lightning.
LIGHTNING = "pytorch_lightning.strategies.launchers.subprocess_script"
DOCTOR = "from ddp_doctor.__main__ import main\nmain()\n"
# Before a script: rank 0 saves its weights after each optimizer step.
SAVING = """
def save_weights(optimizer, args, kwargs):
    import torch

    if torch.distributed.get_rank() == 0:
        [group] = optimizer.param_groups
        torch.save([p.detach() for p in group["params"]], {file!r})

from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(save_weights)
"""


def ask_the_doctor(script: str, ranks: int | None = 2, *options: str) -> None:
    """Run a script with the doctor under torchrun, and print the report.

    None runs it with plain `python`: a script that starts its own ranks.
    """
    done, _ = _run(script, ranks, *options)
    report = re.search(r"─{9}.*─{9}\n", done.stderr, re.DOTALL)
    print(report[0] if report else done.stderr, end="")
    print("exit code", done.returncode)


def findings_in(script: str) -> tuple[list[str], int, list[int], list[Tensor]]:
    """What the doctor finds in a script on two ranks: the codes of errors and warnings,
    sorted; the number of its optimizer steps; the numbers of backward passes per step
    that it has had; and rank 0's weights after the last step.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "weights.pt")
        _, report = _run(SAVING.format(file=str(file)) + script, 2)
        weights = torch.load(file) if file.exists() else []
    found = [one for one in report["findings"] if one["severity"] != "note"]
    backwards = report["measured"].get("backwards", {}).get("backwards", [])
    codes = sorted(one["code"] for one in found)
    return codes, report["steps"]["taken"], backwards, weights


def trained_alone() -> list[Tensor]:
    """The weights of one process that has both ranks' samples of the exercise."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seeded = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(4):
        x = torch.cat([torch.randn(32, 8, generator=of_rank) for of_rank in seeded])
        optimizer.zero_grad()
        F.cross_entropy(model(x), x.argmax(1) % 4).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


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
        # The report is written by a process that outlives the ranks.
        place = 900, Path(folder), env
        if ranks is None:
            done = run_forked(server_with(LIGHTNING), as_script, command, *place, 120)
        else:
            command = [f"--nproc-per-node={ranks}", *command]
            done = run_warm(command, *place, linger=120)
        return done, json.loads(Path(folder, "report.json").read_text())
