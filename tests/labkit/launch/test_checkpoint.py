"""Checkpoints: whole or absent after a kill at any moment, and the same one for all ranks."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from labkit.launch.checkpoint import (
    UnreadableCheckpointError,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from labkit.launch.ranks import run_ranks

KILLED_WHILE_WRITING = """
import os, signal, sys, torch
from pathlib import Path
from labkit.launch import checkpoint

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

really = torch.save
def half(state, file):
    really(state, file)
    file.truncate(file.tell() // 2)
    killed()

if sys.argv[2] == "in the middle of writing":
    torch.save = half
elif sys.argv[2] == "before it is on the disk":
    os.fsync = killed
else:
    Path.replace = killed
checkpoint.save_checkpoint(Path(sys.argv[1]), {"step": 8, "model": torch.ones(1000)})
"""


def test_what_is_saved_comes_back_and_no_other_file_stays(tmp_path):
    path = tmp_path / "runs" / "a.pt"
    state = {"step": 4, "model": {"w": torch.arange(3.0)}, "optimizer": {"lr": [0.1]}}
    save_checkpoint(path, state)
    found = read_checkpoint(path)
    assert found["model"].pop("w").tolist() == [0, 1, 2]
    assert found == {"step": 4, "model": {}, "optimizer": {"lr": [0.1]}}
    assert [p.name for p in path.parent.iterdir()] == ["a.pt"]
    assert read_checkpoint(tmp_path / "none.pt") is None


@pytest.mark.parametrize(
    "moment", ["in the middle of writing", "before it is on the disk", "before it is renamed"]
)
def test_a_kill_while_saving_leaves_the_checkpoint_of_before(moment, tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"step": 4, "model": torch.zeros(1000)})
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(path), moment]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    state = read_checkpoint(path)
    assert state["step"] == 4
    assert not state["model"].any()


def find(rank: int, folder: Path, steps: list[int | None]) -> tuple[int, list[float]] | None:
    # Nodes that share no disk: each rank has a file of its own, or none.
    path = folder / f"{rank}.pt"
    if (step := steps[rank]) is not None:
        save_checkpoint(path, {"step": step, "model": torch.full((2,), 10.0 * step + rank)})
    state = newest_checkpoint(path)
    return None if state is None else (state["step"], state["model"].tolist())


@pytest.mark.parametrize(
    ("steps", "newest"),
    [
        ([None, None, None], None),
        ([None, 0, None], (0, [1.0, 1.0])),
        ([1, 3, 2], (3, [31.0, 31.0])),
        ([2, None, 2], (2, [20.0, 20.0])),
    ],
)
def test_all_ranks_go_on_from_the_newest_that_any_of_them_finds(steps, newest, tmp_path):
    assert run_ranks(find, 3, tmp_path, steps) == [newest] * 3


def out_of_memory(*_: object, **__: object) -> torch.Tensor:
    return torch.empty(2**50)


def find_a_broken_one(rank: int, folder: Path, contents: bytes | Callable | None) -> str:
    path = folder / f"{rank}.pt"
    if rank != 1 or callable(contents):
        save_checkpoint(path, {"step": 2 + rank, "model": torch.zeros(1)})
    elif contents is None:
        path.mkdir()
    else:
        path.write_bytes(contents)
    if rank == 1 and callable(contents):
        torch.load = contents
    with pytest.raises(UnreadableCheckpointError) as caught:
        newest_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"no checkpoint", "{} is not a complete checkpoint; move it away to start from step 0"),
        (None, "cannot read {}: IsADirectoryError"),
        (out_of_memory, "cannot read {}: RuntimeError: "),
    ],
)
def test_every_rank_learns_which_file_cannot_be_read_and_why(contents, said, tmp_path):
    for text in run_ranks(find_a_broken_one, 3, tmp_path, contents):
        assert text.startswith("rank 1: " + said.format(tmp_path / "1.pt"))


def test_a_checkpoint_without_a_step_is_refused(tmp_path):
    torch.save({"model": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(UnreadableCheckpointError, match="not a complete checkpoint"):
        read_checkpoint(tmp_path / "a.pt")
