"""labs/slurm: the batch file, run by a true Slurm of two nodes on this machine."""

import os
import re
import sys
from pathlib import Path

import pytest
from cluster.threads_table import expect_the_threads_table
from processes import all_gone

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root

ROOT = project_root()
SLURM = str(ROOT / "labs" / "slurm" / "one_machine.sh")


def submit(*words: str, marker: str = "", timeout: float = 900.0):
    virtual_environment = str(Path(sys.executable).parent.parent)
    environment = {**os.environ, "VENV": virtual_environment, "MARKER": marker}
    return run_guarded([SLURM, *words], timeout, cwd=ROOT, env=environment)


def test_the_batch_file_prints_one_table_for_eight_ranks_of_two_nodes_and_leaves_nothing():
    marker = f"slurm-{os.getpid()}"
    done = submit(marker=marker)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^Slurm: job \d+ COMPLETED on host\[0-1\]$", done.stdout, re.MULTILINE)
    # torchrun puts [default0]: before the lines that it passes on.
    lines = [re.sub(r"^\[default\d\]:", "", line) for line in done.stdout.splitlines()]
    expect_the_threads_table(lines)
    assert all_gone(marker)
    assert not list(ROOT.glob("slurm-*.out"))
    assert not (ROOT / "logs").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("labs/no_such_lab.py", "no_such_lab.py"),
        ("labs/accumulate_vs_ddp_lightning.py", "without torchrun"),
    ],
)
def test_a_job_that_fails_is_said_to_have_failed(script, said):
    done = submit("labs/slurm/two_nodes.sbatch", script)
    assert done.returncode != 0
    assert re.search(r"^Slurm: job \d+ FAILED on host\[0-1\]$", done.stdout, re.MULTILINE)
    assert said in done.stdout
