"""Files that a certificate's processes hand to one another: tensors and plain data, no code."""

import importlib
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

PATIENCE = 60.0  # seconds that a rank waits for the others' files


def write(path: Path, value: Any) -> list[str]:
    """Write a file that is complete as soon as it has its name.

    Returns the names of classes in it that `read` refuses; then there is no file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(value, part)
    with safe_globals(_data()):
        refused = get_unsafe_globals_in_checkpoint(part)
    if refused:
        part.unlink()
    else:
        part.replace(path)
    return refused


def read(path: Path) -> Any:
    """What `write` has written. Raises pickle.UnpicklingError if it is anything but data."""
    with safe_globals(_data()):
        return torch.load(path, weights_only=True)


def samples_of(rank: int | str) -> str:
    """The name of the file of a rank's samples."""
    return f"samples.{rank}.pt"


def wait_for(paths: list[Path], patience: float = PATIENCE) -> bool:
    """Wait until all files are there; False if they are not after `patience` seconds."""
    until = time.monotonic() + patience
    while not all(path.exists() for path in paths):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _data() -> list[Any]:
    """What a sample may be made of besides tensors and Python's own values: arrays and images."""
    found: list[Any] = []
    if importlib.util.find_spec("numpy"):
        numpy = importlib.import_module("numpy")
        core = importlib.import_module("numpy._core.multiarray")
        found += [numpy.ndarray, numpy.dtype, core.scalar, core._reconstruct]
        found += [getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__]
    if importlib.util.find_spec("PIL"):
        found.append(importlib.import_module("PIL.Image").Image)
    return found
