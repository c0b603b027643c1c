"""Who is missing: told from two looks at what every rank has left in the store."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from labkit.launch.attendance import Sign, report, report_missing_ranks
from labkit.launch.ranks import run_ranks


def signs(**changes: Sign) -> dict[int, Sign]:
    everybody = {rank: Sign(10, 7, f"host{rank // 2}", "step 3: backward") for rank in range(4)}
    return everybody | {int(name[4:]): sign for name, sign in changes.items()}


def a_moment_later(found: dict[int, Sign], silent: tuple[int, ...] = ()) -> dict[int, Sign]:
    return {
        rank: sign if rank in silent else sign._replace(beats=sign.beats + 4)
        for rank, sign in found.items()
    }


@pytest.mark.parametrize("reporter", [0, 1, 3])
def test_a_rank_with_a_pulse_and_fewer_notes_is_stuck_where_its_last_note_says(reporter):
    found = signs(rank2=Sign(10, 6, "host1", "step 3: its batch"))
    assert report(reporter, found, a_moment_later(found)) == (
        f'rank {reporter} on host{reporter // 2} waited in vain at "step 3: backward"\n'
        '  stuck: rank 2 on host1, last seen at "step 3: its batch"'
    )


def test_ranks_without_a_pulse_are_gone_wherever_they_were():
    found = signs()
    said = report(0, found, a_moment_later(found, silent=(2, 3)))
    assert said.count("gone: ") == 2
    assert "gone: rank 2 on host1" in said
    assert "gone: rank 3 on host1" in said
    assert "stuck" not in said


def test_a_rank_that_is_slow_and_has_caught_up_meanwhile_is_not_blamed():
    found = signs(rank2=Sign(10, 6, "host1", "step 3: its batch"))
    later = a_moment_later(found) | {2: Sign(14, 7, "host1", "step 3: backward")}
    assert report(0, found, later) == ""


def test_when_all_have_come_nobody_is_blamed():
    assert report(0, signs(), a_moment_later(signs())) == ""


def test_a_rank_that_has_finished_is_blamed_only_if_it_wrote_fewer_notes():
    found = signs(rank1=Sign(9, 7, "host0", "the last step", finished=True))
    assert report(0, found, a_moment_later(found, silent=(1,))) == ""
    found = signs(rank1=Sign(9, 6, "host0", "the last step", finished=True))
    assert report(0, found, a_moment_later(found, silent=(1,))) == (
        'rank 0 on host0 waited in vain at "step 3: backward"\n'
        '  finished early: rank 1 on host0, last seen at "the last step"'
    )


class NotOfACollectiveError(RuntimeError):
    pass


def as_under_torchrun(rank: int) -> dist.TCPStore | None:
    """Rank 0's store, where the environment says; it must outlive the other ranks' last notes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=rank == 0) if rank == 0 else None
    address = [store.port if store else 0]
    dist.broadcast_object_list(address)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(address[0]))
    return store


def fail_while_another_is_slow(rank: int, message: str) -> str:
    store = as_under_torchrun(rank)
    found = "no error"
    try:
        with report_missing_ranks() as note:
            if rank == 0:
                note("the step")
                raise NotOfACollectiveError(message)
            time.sleep(2)
    except (NotOfACollectiveError, SystemExit) as error:
        found = type(error).__name__
    dist.barrier()
    del store
    return found


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("CUDA out of memory", "NotOfACollectiveError"),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms", "SystemExit"),
        ("Application timeout caused pair closure", "SystemExit"),
    ],
)
def test_only_an_error_of_a_collective_is_explained_by_a_slow_rank(message, found):
    assert run_ranks(fail_while_another_is_slow, 2, message) == [found, "no error"]


def enter_and_leave(rank: int, how: str) -> tuple[bool, bool]:
    """Whether SIGTERM has another handler inside, and the caller's own handler again outside."""
    store = as_under_torchrun(rank)

    def own_handler(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, own_handler)
    try:
        with report_missing_ranks() as note:
            inside = signal.getsignal(signal.SIGTERM)
            note("the only step")
            if how == "by an exception":
                raise NotOfACollectiveError
    except NotOfACollectiveError:
        pass
    outside = signal.getsignal(signal.SIGTERM)
    dist.barrier()
    del store
    return inside is not own_handler, outside is own_handler


@pytest.mark.parametrize("how", ["normally", "by an exception"])
def test_the_callers_own_handler_of_sigterm_is_back_once_the_block_has_ended(how):
    assert run_ranks(enter_and_leave, 2, how) == [(True, True)] * 2
