"""The certificate of functions: each verdict on 2 and 3 ranks, and what is no verdict."""

import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from doctor import steps_to_certify as step

from ddp_doctor.testing import NotJudgedError, assert_certified

EQUAL, SCALED, DIFFERENT, NOT_JUDGED = "equal", "scaled", "different", "not judged"
CASES: dict[str, tuple[Any, Any, Any, str, str]] = {
    # model, backward, batches, the verdict, the verdict on a sum that is divided by a constant
    "a mean": (step.ddp, step.own_mean, step.batches, EQUAL, NOT_JUDGED),
    "the count of all": (step.ddp, step.count_of_all, step.unequal, EQUAL, NOT_JUDGED),
    "own counts": (step.ddp, step.own_mean, step.unequal, DIFFERENT, NOT_JUDGED),
    "1/W": (step.ddp, step.over_world_size, step.batches, SCALED, NOT_JUDGED),
    "plain gather": (step.ddp, step.plain_gather, step.batches, DIFFERENT, DIFFERENT),
    "differentiable gather": (
        step.ddp,
        step.differentiable_gather,
        step.batches,
        EQUAL,
        NOT_JUDGED,
    ),
    "own negatives": (step.ddp, step.own_negatives, step.batches, DIFFERENT, DIFFERENT),
    "accumulation": (step.ddp, step.accumulated, step.batches, EQUAL, NOT_JUDGED),
    "no last sync": (step.ddp, step.never_synchronized, step.batches, DIFFERENT, DIFFERENT),
    "averaged by hand": (step.plain, step.averaged, step.batches, EQUAL, NOT_JUDGED),
    "summed by hand": (step.plain, step.summed, step.batches, SCALED, NOT_JUDGED),
    "bypassed": (step.ddp, step.bypassed, step.batches, DIFFERENT, DIFFERENT),
    "dropout": (step.with_dropout, step.own_mean, step.batches, NOT_JUDGED, NOT_JUDGED),
    "own statistics": (step.with_own_statistics, step.own_mean, step.batches, DIFFERENT, DIFFERENT),
    "frozen statistics": (
        *(step.with_frozen_statistics, step.own_mean, step.batches),
        *(EQUAL, NOT_JUDGED),
    ),
    "MiniDDP": (step.miniddp, step.count_of_all, step.unequal, EQUAL, NOT_JUDGED),
    "MiniDDP, own counts": (step.miniddp, step.own_mean, step.unequal, DIFFERENT, NOT_JUDGED),
    "fully_shard": (step.sharded, step.count_of_all, step.unequal, EQUAL, NOT_JUDGED),
    "fully_shard, 1/W": (step.sharded, step.over_world_size, step.batches, SCALED, NOT_JUDGED),
    "replicate": (step.replicated, step.count_of_all, step.unequal, EQUAL, NOT_JUDGED),
    "replicate, 1/W": (step.replicated, step.over_world_size, step.batches, SCALED, NOT_JUDGED),
}


def verdict_of(**given: Any) -> tuple[str, str]:
    try:
        assert_certified(**given)
    except AssertionError as error:
        return str(error).strip().partition(",")[0].lower(), str(error)
    return EQUAL, ""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_verdict_with_and_without_a_constant_in_the_loss(case: str, ranks: int) -> None:
    model, backward, batches, wanted, with_constant = CASES[case]
    given = {"make_model": model, "batches": batches, "ranks": ranks}
    verdict, text = verdict_of(backward=backward, **given)
    assert verdict == wanted, text
    summed = functools.partial(backward, reduce=step.sum_over_constant)
    verdict, text = verdict_of(backward=summed, **given)
    assert verdict == with_constant, text


@pytest.mark.parametrize(
    ("model", "backward", "wanted"),
    [(step.plain, step.summed_in_backward, SCALED), (step.ddp, step.computed_by_hand, DIFFERENT)],
)
def test_a_sum_inside_of_backward_and_gradients_that_pass_ddp_by_are_seen(
    model: Any, backward: Any, wanted: str
) -> None:
    """What an autograd function sums is what autograd computed, so only P1 sees it."""
    verdict, text = verdict_of(make_model=model, backward=backward, batches=step.batches)
    assert verdict == wanted, text


@pytest.mark.parametrize(
    ("backward", "constant", "wanted", "factor"),
    [
        (step.own_mean, "rank", EQUAL, ""),
        (step.own_mean, "all", SCALED, "0.5 times"),
        (step.count_of_all, "rank", SCALED, "2 times"),
        (step.count_of_all, "all", EQUAL, ""),
    ],
)
def test_a_stated_constant_makes_the_factor_of_a_sum_known(
    backward: Any, constant: str, wanted: str, factor: str
) -> None:
    backward = functools.partial(backward, reduce=step.sum_over_constant)
    given = {"make_model": step.ddp, "backward": backward, "batches": step.batches}
    verdict, text = verdict_of(constant=constant, **given)
    assert verdict == wanted
    assert factor in text


@pytest.mark.parametrize(
    ("model", "backward", "batches", "said"),
    [
        (step.ddp, step.zero, step.batches, "zero everywhere"),
        (step.ddp, step.not_a_number, step.batches, "NaN or infinity"),
        (step.ddp, step.cropped, step.batches, "did not get the same samples"),
        (step.ddp, step.steps, step.batches, "backward changed 0.weight"),
        (step.unseeded, step.averaged, step.batches, "starts with another 0.weight than rank 0"),
        (step.ddp, step.raises, step.batches, "ArithmeticError: no loss today"),
        (step.ddp, step.of_pairs, step.unequal, "in of_pairs"),
    ],
)
def test_what_shows_nothing_is_not_judged(
    model: Any, backward: Any, batches: Any, said: str
) -> None:
    with pytest.raises(NotJudgedError, match=said) as raised:
        assert_certified(make_model=model, backward=backward, batches=batches)
    assert "ddp_doctor/" not in str(raised.value)


def test_the_user_says_what_a_sample_is() -> None:
    given = {"make_model": step.ddp, "backward": step.of_pairs, "batches": step.pairs}
    assert_certified(**given, join=step.join_pairs, deal=step.deal_pairs)


def test_ranks_that_wait_for_one_another_are_ended_and_named() -> None:
    given = {"make_model": step.ddp, "backward": step.waits, "batches": step.batches}
    with pytest.raises(NotJudgedError, match="failed"):
        assert_certified(**given, limit=2.0)


CALLER = """
import sys, time
import tempfile
import shutil
from ddp_doctor.testing import assert_certified

def make_model():
    open({mark!r}, "a").close()
    time.sleep(600)

def unused(*given):
    return []

if __name__ == "__main__":
    assert_certified(make_model=make_model, backward=unused, batches=unused)
"""


@pytest.mark.slow
def test_a_killed_caller_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    mark, script = tmp_path / "mark", tmp_path / "caller.py"
    script.write_text(CALLER.format(mark=str(mark)))
    # A short path: the server's socket lies below it.
    folder = Path(tempfile.mkdtemp(prefix="k"))
    with open(tmp_path / "said", "wb") as said:
        caller = subprocess.Popen(
            [sys.executable, script],
            env=os.environ | {"TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    until = time.monotonic() + 120
    while not mark.exists() and caller.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert mark.exists(), (tmp_path / "said").read_text()
    below = psutil.Process(caller.pid).children(recursive=True)
    assert len(below) >= 4  # the guard, the server, and two ranks
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert not psutil.wait_procs(below, timeout=30)[1]
    assert not list(folder.glob("ddp-doctor-*"))
    shutil.rmtree(folder)


def test_a_certificate_leaves_only_the_server_that_starts_the_next() -> None:
    verdict_of(make_model=step.ddp, backward=step.own_mean, batches=step.batches)
    assert not multiprocessing.active_children()
