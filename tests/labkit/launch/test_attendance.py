"""Who is missing: told from two looks at what every rank has left in the store."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from labkit.launch.attendance import Sign, report, report_missing_ranks
from labkit.launch.ranks import run_ranks

BEHIND = Sign(10, 6, "host1", "step 3: its batch")
WAITED = 'rank 0 on host0 waited in vain at "step 3: backward"\n'


@pytest.mark.parametrize(
    ("signs", "silent", "later", "said"),
    [
        ({2: BEHIND}, (), {}, 'stuck: rank 2 on host1, last seen at "step 3: its batch"'),
        ({}, (2,), {}, 'gone: rank 2 on host1, last seen at "step 3: backward"'),
        ({2: BEHIND}, (), {2: Sign(14, 7, "host1", "step 3: backward")}, ""),  # caught up
        ({}, (), {}, ""),
        ({1: Sign(9, 7, "host0", "the last step", finished=True)}, (1,), {}, ""),
        (
            {1: Sign(9, 6, "host0", "the last step", finished=True)},
            (1,),
            {},
            'finished early: rank 1 on host0, last seen at "the last step"',
        ),
    ],
)
def test_a_rank_is_stuck_gone_or_finished_early_or_not_missing(signs, silent, later, said):
    before = {rank: Sign(10, 7, f"host{rank // 2}", "step 3: backward") for rank in range(4)}
    before |= signs
    after = {
        rank: sign if rank in silent else sign._replace(beats=sign.beats + 4)
        for rank, sign in before.items()
    }
    assert report(0, before, after | later) == (f"{WAITED}  {said}" if said else "")


class NotOfACollectiveError(RuntimeError):
    pass


def fail_while_another_is_slow(rank: int, message: str) -> tuple[str, bool, bool]:
    """The error that comes out, and whether SIGTERM is handled inside, and as before outside."""
    # Rank 0's store, where the environment says; it must outlive the other ranks' last notes.
    store = dist.TCPStore("127.0.0.1", 0, is_master=rank == 0) if rank == 0 else None
    address = [store.port if store else 0]
    dist.broadcast_object_list(address)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(address[0]))

    def own_handler(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, own_handler)
    found = "no error"
    try:
        with report_missing_ranks() as note:
            handled = signal.getsignal(signal.SIGTERM) is not own_handler
            if rank == 0:
                note("the step")
                raise NotOfACollectiveError(message)
            time.sleep(2)
    except (NotOfACollectiveError, SystemExit) as error:
        found = type(error).__name__
    dist.barrier()
    del store
    return found, handled, signal.getsignal(signal.SIGTERM) is own_handler


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("CUDA out of memory", "NotOfACollectiveError"),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms", "SystemExit"),
        ("Application timeout caused pair closure", "SystemExit"),
    ],
)
def test_only_an_error_of_a_collective_is_explained_by_a_slow_rank(message, found):
    assert run_ranks(fail_while_another_is_slow, 2, message) == [
        (found, True, True),
        ("no error", True, True),
    ]
