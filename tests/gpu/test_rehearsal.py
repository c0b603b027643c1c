"""The GPU kit without a GPU: what can be rehearsed runs, and what was not proved is listed."""

import os
import sys
from dataclasses import replace

import pytest
import torch

from labkit.book.on_gpus import FIGURE, REPORT, GpuReport, read, store, substitutions
from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root
from tests.gpu import Machine
from tests.gpu import __main__ as kit

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
def report(tmp_path_factory) -> GpuReport:
    folder = tmp_path_factory.mktemp("rehearsal")
    (folder / "sitecustomize.py").write_text(SITE)
    words = [word for part in (*QUICK, "pytorch", "chapters") for word in ("-k", part)]
    command = ["-m", "tests.gpu", "--device", "cpu", "--report", str(folder / "report.json")]
    environment = {"PYTHONPATH": os.pathsep.join((str(folder), str(project_root() / "src")))}
    done = run_guarded(
        [sys.executable, *command, "--minutes", "20", *words],
        1200,
        cwd=project_root(),
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing in this table was proved on a GPU" in done.stdout
    return read(folder / "report.json")


def test_a_rehearsal_proves_nothing_about_gpus_and_is_not_stored(report, tmp_path):
    assert {proof.outcome for proof in report.proofs} == {"rehearsed", "not proved"}
    reasons = {proof.part: proof.detail for proof in report.proofs}
    assert reasons["pytorch"] == "needs expecttest"
    assert reasons["chapters"].startswith("needs nbclient")
    assert report.versions["torch"] == torch.__version__
    report.write(tmp_path / "report.json")
    with pytest.raises(ValueError, match="rehearsal"):
        store(tmp_path / "report.json", tmp_path)
    assert not (tmp_path / REPORT).exists()
    assert "Nothing in this book has been run on a GPU" in substitutions(tmp_path)["gpu_report"]


def test_a_report_that_is_stored_shows_its_card_rows_and_timelines(report, tmp_path):
    versions = {"GPUs": "Card of a test, Card of a test", "driver": "1.2"}
    real = replace(report, rehearsal=False, versions=versions)
    (tmp_path / REPORT).parent.mkdir()
    real.write(tmp_path / "report.json")
    store(tmp_path / "report.json", tmp_path)
    assert read(tmp_path / REPORT) == real
    said = substitutions(tmp_path)
    assert "Run on Card of a test**" in said["gpu_report"]
    assert "driver 1.2" in said["gpu_report"]
    assert said["gpu_report"].count("\n| `") == len(real.proofs)
    assert set(real.timelines) == {"MiniDDP", "torch DDP"}
    assert f"/{FIGURE}" in said["gpu_timelines"]
    assert (tmp_path / FIGURE).read_text().lstrip().startswith("<?xml")


def test_what_fails_or_needs_more_gpus_than_there_are_is_no_proof():
    def find(machine):
        raise RuntimeError("CUDA error\nand more")
        yield

    one = Machine("cuda", ("H100",))
    outcomes = [
        next(kit.prove(kit.Part("name", "claim", gpus, 60, find), one)).outcome for gpus in (1, 2)
    ]
    assert outcomes == ["FAILED", "not proved"]
