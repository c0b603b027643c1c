"""The helper for users' tests: which arguments it takes, and that it certifies a script."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from doctor import steps_to_certify as step

from ddp_doctor.testing import assert_certified

GIVEN = {"make_model": step.ddp, "backward": step.own_mean, "batches": step.batches}


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^loss is .* cannot import by its name") as raised:
        assert_certified(make_model=step.plain, loss=lambda model, x: x, batches=step.batches)
    files = [Path(frame.path).name for frame in raised.traceback]
    assert files == ["test_testing.py", "testing.py"]  # pytest hides the second


def test_a_temporary_folder_that_is_too_long_for_a_socket_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 90)
    with pytest.raises(RuntimeError, match="too long for a socket"):
        assert_certified(**GIVEN)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"script": __file__, "ranks": 1}, ValueError, "ranks is 1"),
        ({"script": "no_such.py"}, FileNotFoundError, "no script 'no_such.py' here"),
        ({}, TypeError, "pass a script, or make_model, backward or loss, and batches"),
        ({**GIVEN, "batches": None}, TypeError, "batches missing"),
        ({**GIVEN, "script": __file__}, TypeError, "pass a script, or"),
        ({**GIVEN, "loss": step.losses}, TypeError, "pass a script, or"),
        ({**GIVEN, "constant": "none"}, ValueError, "constant is 'none'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        assert_certified(**arguments)


SCRIPT = """
import sys
import torch
import torch.distributed as dist

assert sys.argv[1:] == ["--lr", "1"]
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).pow(2).mean().backward()
    optimizer.step()
"""


def test_a_script_is_certified_whatever_the_tests_own_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert_certified("train.py", "--lr", "1")
