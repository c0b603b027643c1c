"""Checkpoints that survive a kill at any moment and are the same on all ranks.

    saved = newest_checkpoint(path)                     # on every rank: one dictionary, or None
    save_checkpoint(path, {"step": 8, "model": …})      # on rank 0 only

A process can be killed between any two instructions, so `save_checkpoint` never writes to the file
that it replaces. It writes another file, flushes it to the disk, and renames it; a rename is
atomic.

Ranks may be killed at different steps, and nodes without a shared disk have different files. So
`newest_checkpoint` compares the files of all ranks and gives every rank the newest one.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Checkpoint = dict[str, Any]


class UnreadableCheckpointError(RuntimeError):
    """A file exists that is not a checkpoint, or that a rank cannot read. The text names it."""


def save_checkpoint(path: Path, state: Checkpoint) -> None:
    """Replace the file by `state`, completely or not at all. `state` must have the key "step".

    It may hold tensors, numbers, strings, lists, and dictionaries; nothing else can be read back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # or a machine that loses power keeps a name without contents
    unfinished.replace(path)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Read the checkpoint at `path` on this rank; None if there is no file.

    Raises UnreadableCheckpointError for a file that `save_checkpoint` did not write. Errors that
    say nothing about the file are raised unchanged: an OSError (no permission, a failing disk), a
    MemoryError, or a RuntimeError of torch's allocator.
    """
    incomplete = f"{path} is not a complete checkpoint; move it away to start from step 0"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if "DefaultCPUAllocator" in str(error):
            raise
        # Any unpickling error: the file is truncated or is not a checkpoint.
        raise UnreadableCheckpointError(incomplete) from error
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise UnreadableCheckpointError(incomplete)
    return state


def newest_checkpoint(path: Path, group: dist.ProcessGroup | None = None) -> Checkpoint | None:
    """The newest checkpoint of all ranks, the same on every rank; None if no rank has one.

    Every rank must call it. It costs one all-gather of the step numbers and one broadcast of the
    state, on the CPU, from the lowest rank that has the newest checkpoint.

    Raises UnreadableCheckpointError on every rank if one rank cannot read its file; the text names
    the rank and its error.
    """
    found: Checkpoint | None = None
    error: Exception | None = None
    mine: int | str = -1
    try:
        if found := read_checkpoint(path):
            mine = found["step"]
    except UnreadableCheckpointError as raised:
        error, mine = raised, str(raised)
    except Exception as raised:  # whatever it is: the others wait to hear of it
        error, mine = raised, f"cannot read {path}: {type(raised).__name__}: {raised}"
    steps: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(steps, mine, group=group)
    for rank, step in enumerate(steps):
        if isinstance(step, str):
            raise UnreadableCheckpointError(f"rank {rank}: {step}") from error
    if max(steps) < 0:
        return None
    source = steps.index(max(steps))
    handed = [found if dist.get_rank(group) == source else None]
    dist.broadcast_object_list(handed, group=group, group_src=source)
    return handed[0]
