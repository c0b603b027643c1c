"""Checkpoints: whole or absent after a kill at any moment, and the same one for all ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_what_is_saved_comes_back(tmp_path):
    path = tmp_path / "runs" / "a.pt"
    save_checkpoint(
        path, {"step": 4, "model": {"w": torch.arange(3.0)}, "optimizer": {"lr": [0.1]}}
    )
    state = read_checkpoint(path)
    assert state["step"] == 4
    assert state["model"]["w"].tolist() == [0, 1, 2]
    assert state["optimizer"] == {"lr": [0.1]}
    assert [p.name for p in path.parent.iterdir()] == ["a.pt"]
    assert read_checkpoint(tmp_path / "none.pt") is None


@pytest.mark.parametrize(
    "moment", ["in the middle of writing", "before it is on the disk", "before it is renamed"]
)
def test_a_kill_while_saving_leaves_the_checkpoint_of_before(moment, tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"step": 4, "model": torch.zeros(1000)})
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_WRITING, str(path), moment],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    state = read_checkpoint(path)
    assert state["step"] == 4
    assert not state["model"].any()


def find(rank: int, folder: Path, steps: list[int | None]) -> tuple[int, list[float]] | None:
    # Nodes that share no disk: each rank has a file of its own, or none.
    path = folder / f"{rank}.pt"
    path.unlink(missing_ok=True)
    if steps[rank] is not None:
        save_checkpoint(
            path, {"step": steps[rank], "model": torch.full((2,), 10.0 * steps[rank] + rank)}
        )
    state = newest_checkpoint(path)
    return None if state is None else (state["step"], state["model"].tolist())


@settings(max_examples=8)
@given(steps=st.lists(st.none() | st.integers(0, 3), min_size=3, max_size=3))
def test_all_ranks_go_on_from_the_newest_that_any_of_them_finds(steps, tmp_path_factory):
    found = run_ranks(find, 3, tmp_path_factory.mktemp("nodes"), steps)
    there = [step for step in steps if step is not None]
    wanted = None
    if there:
        value = 10.0 * max(there) + steps.index(max(there))
        wanted = (max(there), [value, value])
    assert found == [wanted] * 3


def find_a_broken_one(rank: int, folder: Path) -> str:
    path = folder / f"{rank}.pt"
    if rank == 1:
        path.write_bytes(b"not a checkpoint")
    else:
        save_checkpoint(path, {"step": 2, "model": torch.zeros(1)})
    with pytest.raises(UnreadableCheckpointError) as caught:
        newest_checkpoint(path)
    return str(caught.value)


def test_a_file_that_is_no_checkpoint_is_named_on_every_rank(tmp_path):
    for said in run_ranks(find_a_broken_one, 3, tmp_path):
        assert said.startswith("rank 1: ")
        assert "1.pt is not a complete checkpoint; move it away to start from step 0" in said


def out_of_memory(*_: object, **__: object) -> torch.Tensor:
    return torch.empty(2**50)


def python_out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError


def find_one_that_cannot_be_read(rank: int, folder: Path, load: Callable | None) -> str:
    path = folder / f"{rank}.pt"
    if rank != 1:
        save_checkpoint(path, {"step": 2, "model": torch.zeros(1)})
    elif load is None:
        path.mkdir()
    else:
        save_checkpoint(path, {"step": 8, "model": torch.zeros(1)})
        torch.load = load
    with pytest.raises(UnreadableCheckpointError) as caught:
        newest_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (None, "IsADirectoryError"),
        (python_out_of_memory, "MemoryError"),
        (out_of_memory, "DefaultCPUAllocator"),
    ],
)
def test_a_file_that_a_rank_cannot_read_is_told_to_every_rank_and_not_called_broken(
    load, said, tmp_path
):
    for text in run_ranks(find_one_that_cannot_be_read, 3, tmp_path, load):
        assert text.startswith(f"rank 1: cannot read {tmp_path / '1.pt'}: ")
        assert said in text
        assert "move it away" not in text


def test_an_error_of_the_system_is_not_an_error_of_the_file(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_checkpoint(tmp_path)


def test_a_checkpoint_without_a_step_is_refused(tmp_path):
    torch.save({"model": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(UnreadableCheckpointError, match="not a complete checkpoint"):
        read_checkpoint(tmp_path / "a.pt")
