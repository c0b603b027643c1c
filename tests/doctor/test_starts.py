"""How a script is started for a certificate, what is off in it, and how it ended."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_doctor.certificate import starts
from ddp_doctor.certificate.child import _gather_of_one
from ddp_doctor.certificate.fixed import Replacements
from ddp_doctor.certificate.plan import WORLD, Part
from ddp_doctor.certificate.program import keep_output
from ddp_doctor.certificate.record import StepNotes
from ddp_doctor.certificate.starts import Start, error_in
from labkit.launch.ranks import run_ranks


def what_is_fixed(rank: int) -> tuple[bool, float]:
    """Whether SyncBatchNorm uses its running statistics; the largest gradient, as clipping says."""
    fixed = Replacements(StepNotes())
    inputs = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(rank))
    normal = torch.nn.SyncBatchNorm(3)(inputs)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([3.0, 4.0])
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0, float("inf"))
    as_running = torch.allclose(normal, inputs, atol=1e-4) and not fixed.notes.batch_norm
    return as_running, float(norm)


def test_synchronized_batch_norm_and_clipping_by_another_norm_are_fixed_too() -> None:
    assert run_ranks(what_is_fixed, 2) == [(True, 4.0)] * 2


def test_what_one_process_gathers_from_itself_carries_gradient() -> None:
    gathered: list[Any] = []
    gather = _gather_of_one(lambda *tensors: gathered.append(tensors))
    own, every = torch.ones(2, requires_grad=True), [torch.zeros(2)]
    gather(every, own)
    every[0].sum().backward()
    assert own.grad is not None
    assert not gathered
    gather(every, own.detach())
    gather([torch.zeros(2)] * 2, own)
    assert len(gathered) == 2


class Killed(Start):
    def process(self, *_: Any) -> "subprocess.Popen[bytes]":
        (self.output / "0.txt").write_text("step 1\n")
        return subprocess.Popen(["sh", "-c", "kill -KILL $$"], start_new_session=True)


def test_one_process_that_is_killed_has_failed(tmp_path: Path) -> None:
    said = Killed(Part(str(tmp_path), "one"), [], [{}]).wait()
    assert said == "step 1 (it was ended by SIGKILL)"


class Waits(Start):
    def process(self, *_: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["sleep", "600"], start_new_session=True)


def test_what_still_waits_once_all_ranks_have_left_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "AFTER_PLAN", 0.1)
    part = Part(str(tmp_path), "ranks")
    start = Waits(part, [], [{}])
    part.path(WORLD).write_text("2")
    part.leave(0)
    assert not part.is_done()
    part.leave(1)
    began = time.monotonic()
    assert start.wait() == ""
    assert time.monotonic() - began < 60


def test_a_long_start_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(starts, "WORD", 0.05)
    monkeypatch.setattr(starts, "LIMIT", 0.1)
    said = Waits(Part(str(tmp_path), "one"), [], [{}]).wait()
    assert "did not end" in said, "and no signal has ended it, which it does not expect yet"
    assert "waiting for one process of the script, 0 s so far" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("ValueError: no", "ValueError: no at train.py:3"),
        ("_pickle.UnpicklingError: no", "_pickle.UnpicklingError: no at train.py:3"),
        ("[rank1]: KeyError: 'x'", "KeyError: 'x' at train.py:3"),
        ("KeyError: 'x'\nlauncher.errors.ChildFailedError: ", "KeyError: 'x' at train.py:3"),
        ("KeyError: 'x'\nRuntimeError: Connection closed by peer", "KeyError: 'x' at train.py:3"),
        (
            "OSError: AF_UNIX path too long",
            "OSError: AF_UNIX path too long at train.py:3; set TMPDIR to a shorter folder",
        ),
        ("The doctor failed: TypeError: x", "The doctor failed: TypeError: x at train.py:3"),
    ],
)
def test_the_last_error_is_found_with_the_line_of_the_script(line: str, text: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "/home/me/train.py", line 3\n{line}\nsee x'
    assert error_in(trace) == text


def test_what_the_ranks_printed_is_kept_where_that_can_be_written(tmp_path: Path) -> None:
    """Also though one process was never started."""
    (tmp_path / "ranks" / "output").mkdir(parents=True)
    (tmp_path / "ranks" / "output" / "0.txt").write_text("ValueError: no")
    assert keep_output(tmp_path, tmp_path / "kept").endswith(str(tmp_path / "kept"))
    assert (tmp_path / "kept" / "ranks" / "0.txt").read_text() == "ValueError: no"
    (tmp_path / "a file").touch()
    assert "could not keep" in keep_output(tmp_path, tmp_path / "a file" / "output")
