"""Checkpoints survive a kill and are the same on all ranks; the missing ranks are named."""

import os
import runpy
import signal
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.distributed as dist

from labkit.launch.forks import start_forked
from labkit.launch.ranks import run_ranks
from labkit.launch.scripts import project_root
from missing_ranks import Sign, report, report_missing_ranks

LAB = str(project_root() / "labs/when_a_node_fails.py")
BEHIND = Sign(10, 6, "host1", "step 3: its batch")
WAITED = 'rank 0 on host0 timed out at "step 3: backward"\n'


def be_killed_while_saving(path: Path, moment: str) -> None:
    """Save a checkpoint, and then another one, which is interrupted for good."""
    save_checkpoint = runpy.run_path(LAB)["save_checkpoint"]
    save_checkpoint(path, {"step": 4, "model": torch.zeros(1000)})
    save = torch.save

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(state: object, file: BinaryIO) -> None:
        save(state, file)
        file.truncate(file.tell() // 2)
        killed()

    owner, name, fails = {
        "writing": (torch, "save", half),
        "reaching the disk": (os, "fsync", killed),
        "renaming": (Path, "replace", killed),
    }[moment]
    setattr(owner, name, fails)
    save_checkpoint(path, {"step": 8, "model": torch.ones(1000)})


@pytest.mark.parametrize("moment", ["writing", "reaching the disk", "renaming"])
def test_a_kill_while_saving_leaves_the_checkpoint_of_before(moment, tmp_path):
    path = tmp_path / "a.pt"
    process = start_forked(be_killed_while_saving, path, moment)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    state = torch.load(path)
    assert state["step"] == 4
    assert not state["model"].any()


@pytest.mark.parametrize(
    ("steps", "newest"),
    [
        ([None, None, None], None),
        ([None, 0, None], (0, [1.0, 1.0])),
        ([1, 3, 2], (3, [31.0, 31.0])),
        ([2, b"no checkpoint", 2], "rank 1 cannot read .*/1.pt"),
    ],
)
def test_all_ranks_go_on_from_the_newest_or_name_what_cannot_be_read(steps, newest, tmp_path):
    def work(rank: int) -> None:  # nodes that share no disk: each rank has its own file
        lab = runpy.run_path(LAB)
        path, step = tmp_path / f"{rank}.pt", steps[rank]
        if isinstance(step, bytes):
            path.write_bytes(step)
        elif step is not None:
            model = torch.full((2,), 10.0 * step + rank)
            lab["save_checkpoint"](path, {"step": step, "model": model})
        if isinstance(newest, str):
            with pytest.raises(SystemExit, match=newest):
                lab["newest_checkpoint"](path)
        else:
            state = lab["newest_checkpoint"](path)
            assert (state and (state["step"], state["model"].tolist())) == newest

    run_ranks(work, 3)


@pytest.mark.parametrize(
    ("signs", "silent", "later", "said"),
    [
        ({2: BEHIND}, (), {}, 'stuck: rank 2 on host1, last seen at "step 3: its batch"'),
        ({}, (2,), {}, 'gone: rank 2 on host1, last seen at "step 3: backward"'),
        ({2: BEHIND}, (), {2: Sign(14, 7, "host1", "step 3: backward")}, ""),  # caught up
        ({}, (), {}, ""),
        ({1: Sign(9, 8, "host0", "the end")}, (1,), {}, ""),
        (
            {1: Sign(9, 7, "host0", "the end")},
            (1,),
            {},
            'gone: rank 1 on host0, last seen at "the end"',
        ),
    ],
)
def test_a_rank_is_stuck_or_gone_or_not_missing(signs, silent, later, said):
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
    address = [0]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        address = [store.port]
    dist.broadcast_object_list(address)
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", address[0], is_master=False)
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
            store.wait(["rank 0 has its error"])
    except (NotOfACollectiveError, SystemExit) as error:
        found = type(error).__name__
        store.set("rank 0 has its error", "")
    dist.barrier()
    del store
    return found, handled, signal.getsignal(signal.SIGTERM) is own_handler


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("CUDA out of memory", "NotOfACollectiveError"),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms", "SystemExit"),
    ],
)
def test_only_an_error_of_a_collective_is_explained_by_a_slow_rank(message, found):
    assert run_ranks(fail_while_another_is_slow, 2, message) == [
        (found, True, True),
        ("no error", True, True),
    ]
