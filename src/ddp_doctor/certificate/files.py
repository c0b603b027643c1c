"""Files that a certificate's processes hand to one another: tensors, places, and plain data."""

import importlib
import importlib.util
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

PATIENCE = 60.0  # seconds that a rank waits for the others' files


class Place(NamedTuple):
    """Where samples come from: a line of the script, or a data loader, with its number as line."""

    file: str
    line: int
    instruction: int = 0
    evaluates: bool = False  # whether the model only evaluates
    function: str = ""
    argument: int = -1  # of the function, if the samples are one


def write(path: Path, value: Any) -> list[str]:
    """Write a file that is complete as soon as it has its name.

    Returns the names of classes in it that `read` refuses; then there is no file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(value, draft)
    with safe_globals(_data_classes()):
        classes = get_unsafe_globals_in_checkpoint(draft)
    if classes:
        draft.unlink()
    else:
        draft.replace(path)
    return classes


def read(path: Path) -> Any:
    """What `write` has written. Raises pickle.UnpicklingError if it is anything but data.

    Tensors are pages of the file, which are read when they are needed.
    """
    with safe_globals(_data_classes()):
        return torch.load(path, weights_only=True, mmap=True)


def samples_of(rank: int | str) -> str:
    """The name of the file of a rank's samples."""
    return f"samples.{rank}.pt"


def wait_for(paths: list[Path], patience: float = PATIENCE) -> bool:
    """Wait until all files are there; False if they are not after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _data_classes() -> list[Any]:
    """What a file holds besides tensors and Python's own values: places, arrays, and images."""
    classes: list[Any] = [Place]
    if importlib.util.find_spec("numpy"):
        numpy = importlib.import_module("numpy")
        core = importlib.import_module("numpy._core.multiarray")
        classes += [numpy.ndarray, numpy.dtype, core.scalar, core._reconstruct]
        classes += [getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__]
    if importlib.util.find_spec("PIL"):
        classes.append(importlib.import_module("PIL.Image").Image)
    return classes
