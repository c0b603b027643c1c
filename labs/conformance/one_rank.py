"""One rank of a job: calls adapters, and writes what their optimizers got.

FOLDER/NUMBER.RANK.pt is a cell's gradient and FOLDER/NUMBER.wanted.pt, from rank 0, the wanted one
with its usual wrong relatives. The first exception ends the job: FOLDER/NUMBER.RANK.error.
"""

import importlib
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from cases import CASES, wanted
from labkit.launch.lab import leave_group
from tiny import gradient_of
from trainers import TRAINERS

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def cell(name: str, property_: str, stem: Path) -> None:
    trainer, case = TRAINERS[name], CASES[property_]
    if RANK == 0:
        relatives = wanted(case, trainer.promise)
        found = {of: gradient_of(weighted) for of, weighted in relatives.items()}
        torch.save(found, f"{stem}.wanted.pt")
    file, function = trainer.adapter.split(":")
    try:
        adapter = getattr(importlib.import_module(file), function)
        torch.save(adapter(case, RANK, *trainer.options), f"{stem}.{RANK}.pt")
    except Exception as error:
        Path(f"{stem}.{RANK}.error").write_text(f"{type(error).__name__}: {error}")
        raise


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
