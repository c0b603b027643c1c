"""The GPU kit without a GPU: what can be rehearsed runs, and what was not proved is listed."""

import os
import sys
from dataclasses import replace
from subprocess import CompletedProcess

import pytest
import torch

from labkit.book.on_gpus import FIGURE, REPORT, GpuReport, read, store, substitutions
from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root
from tests.gpu import __main__ as kit
from tests.gpu.machine import Machine

ABSENT = ("nbclient", "nbformat", "ipykernel", "IPython", "expecttest", "matplotlib_inline")
SITE = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_spec(name, *args):
    return None if name.partition(".")[0] in {ABSENT!r} else find(name, *args)

PathFinder.find_spec = find_spec
"""


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> tuple[CompletedProcess[str], GpuReport]:
    """Some parts in a Python that has no notebook tools and no expecttest, and nothing installed
    of this project.
    """
    folder = tmp_path_factory.mktemp("rehearsal")
    (folder / "sitecustomize.py").write_text(SITE)
    parts = ["streams", "memory", "overlap", "pytorch", "chapters"]
    words = [word for part in parts for word in ("-k", part)]
    file = folder / "report.json"
    command = ["-m", "tests.gpu", "--device", "cpu", "--report", str(file), "--minutes", "20"]
    path = os.pathsep.join((str(folder), str(project_root() / "src")))
    environment = os.environ | {"PYTHONPATH": path}
    done = run_guarded(
        [sys.executable, *command, *words], 1200, cwd=project_root(), env=environment
    )
    return done, read(file)


def test_a_rehearsal_runs_without_what_a_node_lacks_and_proves_nothing_about_gpus(rehearsal):
    done, report = rehearsal
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing in this table was proved on a GPU" in done.stdout
    outcomes = {proof.outcome for proof in report.proofs}
    assert outcomes == {"rehearsed", "not proved"}
    reasons = {proof.part: proof.detail for proof in report.proofs}
    assert reasons["pytorch"] == "needs expecttest"
    assert reasons["chapters"].startswith("needs nbclient")
    assert report.versions["torch"] == torch.__version__


def test_a_rehearsal_is_not_stored_and_the_page_says_that_there_is_nothing(rehearsal, tmp_path):
    _, report = rehearsal
    assert report.rehearsal
    report.write(tmp_path / "report.json")
    with pytest.raises(ValueError, match="rehearsal"):
        store(tmp_path / "report.json", tmp_path)
    assert not (tmp_path / REPORT).exists()
    assert "Nothing in this book has been run on a GPU" in substitutions(tmp_path)["gpu_report"]


def test_a_report_that_is_stored_shows_its_card_rows_and_timelines(rehearsal, tmp_path):
    _, rehearsed = rehearsal
    versions = {"GPUs": "Card of a test, Card of a test", "driver": "1.2"}
    real = replace(rehearsed, rehearsal=False, versions=versions)
    (tmp_path / REPORT).parent.mkdir()
    real.write(tmp_path / "report.json")
    store(tmp_path / "report.json", tmp_path)
    assert read(tmp_path / REPORT) == real
    said = substitutions(tmp_path)
    assert "Run on Card of a test**" in said["gpu_report"]
    assert "driver 1.2" in said["gpu_report"]
    assert said["gpu_report"].count("\n| `") == len(real.proofs)
    assert set(real.timelines) == {"MiniDDP", "torch DDP"}
    assert "Card of a test" in said["gpu_timelines"]
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
