"""A checkpoint that survives a kill at any moment, and that all ranks agree on.

    saved = newest(path)                         # every rank: the same dictionary, or None
    save(path, {"step": 8, "model": …})          # rank 0 alone

A process can be killed between any two instructions, so `save` never touches the file that it
replaces: it writes another one, makes sure that it is on the disk, and renames it, which file
systems do at once or not at all. Ranks may be killed at different steps, and on nodes that share no
disk each sees files of its own, so `newest` lets them agree: the newest checkpoint that any rank
can read is handed to all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Checkpoint = dict[str, Any]


class UnreadableCheckpointError(RuntimeError):
    """A file is there that is no checkpoint, or that a rank cannot read; the text names it."""


def save_checkpoint(path: Path, state: Checkpoint) -> None:
    """Replace the file by `state`, whole or not at all. `state` must hold its "step".

    Only tensors, numbers, strings, lists and dictionaries can be read back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # or a machine that loses power keeps a name without contents
    unfinished.replace(path)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """What this rank finds at `path`; None if there is no file.

    Raises UnreadableCheckpointError for a file that no `save` has written. What says nothing about
    the file comes through as it is: an OSError (no permission, a disk that fails) and being out of
    memory, a MemoryError or a RuntimeError of torch's allocator.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if "DefaultCPUAllocator" in str(error):
            raise
        # Whatever the unpickler stumbles over: the file is cut short, or is something else.
        raise UnreadableCheckpointError(_none(path)) from error
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise UnreadableCheckpointError(_none(path))
    return state


def _none(path: Path) -> str:
    return f"{path} is no checkpoint, or not a whole one; move it away to start anew"


def newest_checkpoint(path: Path, group: dist.ProcessGroup | None = None) -> Checkpoint | None:
    """The checkpoint to go on from, the same on every rank; None if no rank finds one.

    Every rank has to call it. One all-gather of the steps, and one broadcast of the state, on the
    CPU, from the first rank that has the newest one.

    Raises UnreadableCheckpointError on every rank if one of them finds a file that is none, or
    cannot read the one that it finds; the text holds that rank's error.
    """
    found: Checkpoint | None = None
    error: Exception | None = None
    try:
        found = read_checkpoint(path)
    except Exception as raised:  # whatever it is: the others wait to hear of it
        error = raised
    mine: int | str = found["step"] if found else -1
    if error:
        own = isinstance(error, UnreadableCheckpointError)
        mine = str(error) if own else f"cannot read {path}: {type(error).__name__}: {error}"
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
