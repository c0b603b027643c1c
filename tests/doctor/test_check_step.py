"""`check_step`: the ratio, the cosine, and the name of the factor."""

import functools
import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from doctor import steps_to_check as steps
from processes import all_gone, processes_with

from ddp_doctor import check_step
from ddp_doctor.check import START_WITHIN
from labkit.launch import run_ranks

check_on_forks = functools.partial(check_step, start_method="forkserver")


@pytest.fixture(scope="module", autouse=True)
def the_fork_server_has_torch() -> None:
    """run_ranks has Python's fork server import torch; a process has one such server."""
    run_ranks(lambda: None, 1)


def test_equal_means_are_right_and_the_report_says_so() -> None:
    report = check_step(steps.build, steps.mean, steps.ragged([6, 6]))
    assert report.ratio == pytest.approx(1.0, abs=1e-5)
    assert report.ranks_agree
    assert len(report.parameters) == 4


def test_unequal_means_fail_with_a_cosine_below_one_and_a_global_count_passes() -> None:
    batches = steps.ragged([1, 11])
    with pytest.raises(AssertionError, match="cosine 0"):
        check_on_forks(steps.build, steps.mean, batches)
    check_on_forks(steps.build, steps.sum_over_global_count, batches)


def test_undivided_micro_batches_are_k_times_too_large() -> None:
    report = check_on_forks(steps.build, steps.mean, steps.ragged([4] * 6), 2, 3, raises=False)
    assert report.factor == "K"
    assert report.ratio == pytest.approx(3.0, rel=1e-4)


def test_a_sum_under_an_average_lacks_the_world_size() -> None:
    report = check_on_forks(steps.build, steps.total, steps.ragged([3, 5]), raises=False)
    assert report.factor == "1/W"


def test_a_bypassed_wrapper_is_a_gradient_that_differs_between_ranks() -> None:
    with pytest.raises(AssertionError, match="differ from each other"):
        check_on_forks(steps.build, steps.past_the_wrapper, steps.ragged([4, 4]))


def test_the_rank_that_failed_first_is_named_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed(.|\n)*of rank 1"):
        check_on_forks(steps.build, steps.fails_after_the_others_wait, steps.ragged([2, 2]))


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("fork", "a fork of a process that has run a backward may hang"),
        ("forksever", "Pass one of"),
    ],
)
def test_a_start_method_that_is_not_one_of_the_two_is_refused(method: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"not '{method}'.*{said}"):
        check_step(steps.build, steps.mean, steps.ragged([2, 2]), start_method=method)


def test_ranks_forked_from_a_server_see_the_callers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCALE_OF_THE_STEP", "3")  # which the server does not know
    report = check_on_forks(steps.build, steps.scaled_by_the_environment, steps.ragged([2, 2]))
    assert report.ratio == pytest.approx(1.0, abs=1e-5)


IMPORTED_FIRST = """
import sys

ALREADY = "torch._dynamo" in sys.modules
import torch
from torch import nn

def build():
    return nn.Linear(2, 1)

def loss(model, batch):
    rank = torch.distributed.is_initialized() and torch.distributed.get_world_size() == 2
    assert ALREADY or not rank, "this rank had to import torch"
    return model(batch).mean()
"""
A_TEST = """
import ddp_doctor, torch
from step import build, loss

def test_my_step():
    batches = [torch.ones(3, 2), torch.zeros(3, 2)]
    ddp_doctor.check_step(build, loss, batches, start_method="forkserver")
"""


def test_with_the_lines_of_the_book_in_conftest_no_rank_imports_torch(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "book/reference/ask_the_doctor.ipynb"
    text = "".join("".join(cell["source"]) for cell in json.loads(page.read_text())["cells"])
    [lines] = re.findall(r"```python\n(import multiprocessing\n.*?)```", text, re.DOTALL)
    for name, content in (("conftest", lines), ("step", IMPORTED_FIRST), ("test_step", A_TEST)):
        (tmp_path / f"{name}.py").write_text(content)
    # What a rank imports by itself, whatever conftest.py says.
    without = "import sys, ddp_doctor.check; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", without], timeout=60).returncode == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_step.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout


A_LOSS_WITHOUT_END = """
import time
import torch
from pathlib import Path
from ddp_doctor import check_step
from labkit.launch import run_ranks

def build():
    return torch.nn.Linear(2, 1)

def loss(model, batch):
    if torch.distributed.get_world_size() == 2:
        Path(f"rank{torch.distributed.get_rank()}").touch()
        time.sleep(100)
    return model(batch).mean()

if __name__ == "__main__":
    run_ranks(lambda: None, 1)  # a fork server that no signal of the terminal reaches
    check_step(build, loss, [torch.ones(3, 2)] * 2, start_method="forkserver")
"""


def test_no_rank_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    (tmp_path / "check.py").write_text(A_LOSS_WITHOUT_END)
    environment = {**os.environ, "MARKER": marker}
    caller = subprocess.Popen([sys.executable, "check.py"], cwd=tmp_path, env=environment)
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("rank?"))) < 2:
            assert caller.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        # The caller, two ranks, the fork server, and its tracker.
        assert len(processes_with(marker)) >= 5
    finally:
        caller.kill()
        caller.wait()
    assert all_gone(marker)


def test_a_number_of_batches_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 batches for 2 ranks × 1 micro-batches: pass 2"):
        check_on_forks(steps.build, steps.mean, steps.ragged([2, 2, 2]))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (steps.never_ends, r"rank 1 wrote no gradient within 2 s.*pass a longer timeout="),
        (steps.leaves, r"rank 1 ended without a gradient.*Check memory, .* for os\._exit"),
    ],
)
def test_a_rank_without_a_gradient_is_named_with_what_to_do(loss: steps.Loss, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        check_on_forks(steps.build, loss, steps.ragged([2, 2]), wrap=steps.unwrapped, timeout=2.0)


def test_a_rank_that_ends_while_it_starts_is_named_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    loss = steps.LeavesWhileItStarts(tmp_path / "sign")
    with pytest.raises(RuntimeError, match=r"rank [01] ended without a gradient"):
        check_on_forks(steps.build, loss, steps.ragged([2, 2]))
    assert time.monotonic() - started < START_WITHIN


def test_ranks_that_do_not_start_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_doctor.check.START_WITHIN", 0.01)
    with pytest.raises(RuntimeError, match=r"not all ranks had joined .* after 0\.01 s.*timeout="):
        check_step(steps.build, steps.mean, steps.ragged([2, 2]), timeout=0.01)
