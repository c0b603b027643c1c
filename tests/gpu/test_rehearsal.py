"""The GPU kit without a GPU: what can be rehearsed runs, and what was not proved is listed."""

import sys

import pytest
import torch

from labkit.launch.scripts import project_root
from tests.gpu import __main__ as kit
from tests.gpu.machine import Machine


def test_a_rehearsal_runs_and_proves_nothing_about_gpus(monkeypatch, capsys, tmp_path):
    parts = ["streams", "precision", "memory", "draws"]
    words = [word for part in parts for word in ("-k", part)]
    file = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--report", str(file), *words])
    monkeypatch.chdir(project_root())
    assert kit.main() == 0
    said = capsys.readouterr().out
    assert "nothing in this table was proved on a GPU" in said
    assert "30 of 30 as printed" in said
    assert "FAILED" not in said
    assert torch.__version__ in file.read_text()


def test_what_fails_or_needs_more_gpus_than_there_are_is_no_proof():
    def find(machine):
        raise RuntimeError("CUDA error\nand more")
        yield

    one = Machine("cuda", ("H100",))
    outcomes = [
        next(kit.prove(kit.Part("name", "claim", gpus, find), one)).outcome for gpus in (1, 2)
    ]
    assert outcomes == ["FAILED", "not proved"]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="is about a machine without a GPU")
def test_without_a_gpu_the_exit_code_is_2(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert kit.main() == 2
