"""One rank of a job: calls adapters, and writes what their optimizers got.

FOLDER/NUMBER.RANK.pt is a cell's gradient and FOLDER/NUMBER.wanted.pt, from rank 0, the wanted one
with its usual wrong relatives. The first exception ends the job: FOLDER/NUMBER.RANK.error.
"""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.launch.lab import leave_group
from surveys.trainers.trainers import TRAINERS

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def cell(name: str, property_: str, stem: Path) -> None:
    trainer = TRAINERS[name]
    case = trainer.family.cases[property_]
    try:
        if RANK == 0 and trainer.family.reference:
            references = function(trainer.family.reference)
            torch.save(references(case, trainer.wanted, trainer.network), f"{stem}.wanted.pt")
        adapter = function(trainer.adapter)
        torch.save(adapter(case, RANK, *trainer.options), f"{stem}.{RANK}.pt")
    except Exception as error:
        Path(f"{stem}.{RANK}.error").write_text(f"{type(error).__name__}: {error}")
        raise


def function(name: str) -> Callable[..., Any]:
    """The one that is called "file:function"."""
    file, _, own = name.partition(":")
    return getattr(importlib.import_module(f"surveys.trainers.{file}"), own)


def main(folder: str, *words: str) -> None:
    """`words` are a number, a trainer, and a property per cell."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if WORLD > 1:
        dist.init_process_group("gloo")
    for number, name, property_ in zip(words[::3], words[1::3], words[2::3], strict=True):
        cell(name, property_, Path(folder, number))
    if dist.is_initialized():
        leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
