"""The GPU kit without a GPU: what can be rehearsed runs, and what was not proved is listed."""

import os
import sys
from pathlib import Path

import pytest
import torch

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root
from tests.gpu import Machine
from tests.gpu import __main__ as kit
from tests.gpu.report import Proof, Run, markdown

# A node has no notebook tools and no expecttest, and nothing of this project is installed there.
SITE = """
from importlib.machinery import PathFinder

ABSENT = ("nbclient", "nbformat", "ipykernel", "IPython", "expecttest", "matplotlib_inline")
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: (
    None if name.partition(".")[0] in ABSENT else find(name, *args)
)
"""
QUICK = ("streams", "precision", "overlap", "draws", "batch-norm")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rehearsal")
    (folder / "sitecustomize.py").write_text(SITE)
    words = [word for part in (*QUICK, "pytorch", "chapters") for word in ("-k", part)]
    command = ["-m", "tests.gpu", "--device", "cpu", "--report", str(folder / "report.md")]
    environment = {"PYTHONPATH": os.pathsep.join((str(folder), str(project_root() / "src")))}
    done = run_guarded(
        [sys.executable, *command, "--minutes", "20", *words],
        1200,
        cwd=project_root(),
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing in this table was proved on a GPU" in done.stdout
    return folder / "report.md"


def test_the_report_of_a_rehearsal_says_that_it_proves_nothing_about_gpus(report):
    text = report.read_text()
    assert text.startswith("**A rehearsal on a CPU: nothing here was proved on a GPU**")
    assert f"torch {torch.__version__}," in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert {row[0].strip("`") for row in rows} >= {*QUICK, "pytorch", "chapters"}
    assert {row[-2].strip() for row in rows} == {"rehearsed", "not proved"}
    reasons = {row[0]: row[-1] for row in rows}
    assert reasons["`pytorch`"] == "needs expecttest"
    assert reasons["`chapters`"].startswith("needs nbclient")
    assert "One step of MiniDDP and torch DDP" in text
    assert f"(/_static/{report.stem}.svg)" in text
    assert report.with_suffix(".svg").read_text().lstrip().startswith("<?xml")


def test_the_report_of_a_run_names_its_card_once_and_has_a_row_per_proof():
    versions = {"GPUs": "Card of a test, Card of a test", "driver": "1.2"}
    proofs = [Proof("part", "a | b", "1 rank", outcome, "") for outcome in ("proved", "FAILED")]
    text = markdown(Run(False, "the command", "2026-11-29", 3.4, versions), proofs)
    assert text.startswith("**Run on Card of a test** on 2026-11-29, in 3 s: 1 proved, 0 not")
    assert "driver 1.2" in text
    assert text.count("\n| `part` | a \\| b | 1 rank | ") == 2


def test_what_fails_or_needs_more_gpus_than_there_are_is_no_proof():
    def find(machine):
        raise RuntimeError("CUDA error\nand more")
        yield

    one = Machine("cuda", ("H100",))
    outcomes = [
        next(kit.prove(kit.Part("name", "claim", gpus, 60, find), one)).outcome for gpus in (1, 2)
    ]
    assert outcomes == ["FAILED", "not proved"]
