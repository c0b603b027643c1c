"""`check_step`: the ratio, the cosine, and the name of the factor."""

import functools
import multiprocessing.process
import time
from pathlib import Path
from typing import Any

import pytest
from doctor import steps_to_check as steps

from ddp_doctor import check_step
from ddp_doctor.check import START_WITHIN, _rank
from labkit.launch import run_ranks

check_on_forks = functools.partial(check_step, start_method="forkserver")


@pytest.fixture(scope="module", autouse=True)
def the_fork_server_has_torch() -> None:
    """run_ranks has Python's fork server import torch; a process has one such server."""
    run_ranks(lambda: None, 1)


@pytest.fixture
def slow_to_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent looks once a second, as on a busy machine."""
    sleep = time.sleep
    monkeypatch.setattr("ddp_doctor.check.time.sleep", lambda _: sleep(1))


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


def test_a_rank_that_fails_is_named_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed(.|\n)*of rank 1"):
        check_on_forks(steps.build, steps.fails, steps.ragged([2, 2]))


def test_the_rank_that_failed_first_is_named_and_not_one_that_lost_its_connection(
    slow_to_poll: None,
) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed(.|\n)*of rank 1"):
        check_on_forks(steps.build, steps.fails_after_the_others_wait, steps.ragged([2, 2]))


def test_each_rank_stays_until_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    kill, stayed = multiprocessing.process.BaseProcess.kill, []

    def recorded(process: multiprocessing.process.BaseProcess) -> None:
        if not stayed:
            time.sleep(3)  # long enough for a rank that leaves by itself
        stayed.append(process.is_alive())
        kill(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "kill", recorded)
    check_on_forks(steps.build, steps.mean, steps.ragged([3, 3]))
    assert stayed == [True, True]


def test_a_rank_whose_gradient_is_written_does_not_fail_while_the_ranks_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    join = multiprocessing.process.BaseProcess.join

    def slow_join(process: multiprocessing.process.BaseProcess, timeout: float = 60) -> None:
        time.sleep(0.3)
        join(process, timeout)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "join", slow_join)
    wrap = steps.RankZeroLeavesLate
    report = check_on_forks(steps.build, steps.mean, steps.ragged([3, 3]), wrap=wrap)
    assert report.ranks_agree


def test_a_start_method_that_would_copy_this_process_is_refused() -> None:
    with pytest.raises(ValueError, match='"spawn" or "forkserver", got \'fork\''):
        check_step(steps.build, steps.mean, steps.ragged([2, 2]), start_method="fork")


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


def test_a_rank_that_ended_is_named_and_not_one_that_lost_its_connection() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 ended without a gradient: killed, or by os"):
        check_on_forks(steps.build, steps.leaves, steps.ragged([2, 2]))


def test_a_rank_that_ends_while_it_starts_is_named_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    loss = steps.LeavesWhileItStarts(tmp_path / "sign")
    with pytest.raises(RuntimeError, match=r"rank [01] ended without a gradient"):
        check_step(steps.build, loss, steps.ragged([2, 2]))
    assert time.monotonic() - started < START_WITHIN


@pytest.mark.parametrize("timeout", [2.0, 300.0])
def test_no_collective_of_a_rank_times_out_before_the_check_does(
    timeout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def no_group(*_: object, **keywords: object) -> None:
        given.update(keywords)
        raise RuntimeError("no group")

    monkeypatch.setattr("ddp_doctor.check.dist.init_process_group", no_group)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # set otherwise, and for good
    with pytest.raises(SystemExit):
        _rank(0, 2, 1, 0, timeout, str(tmp_path), steps.build, steps.mean, [], steps.unwrapped)
    assert given["timeout"].total_seconds() >= timeout + 10


def test_ranks_that_do_not_start_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_doctor.check.START_WITHIN", 0.01)
    with pytest.raises(RuntimeError, match=r"not all ranks had joined .* after 0\.01 s.*timeout="):
        check_step(steps.build, steps.mean, steps.ragged([2, 2]), timeout=0.01)
