"""The programs of labs/programs are right, and the check sees every bug that it can plant."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from labkit.book.check import (
    NAMES,
    Bug,
    bugs_of,
    faults,
    with_bug,
)
from labkit.launch import project_root, run_ranks

ROOT = project_root()
PROGRAMS = ROOT / "labs/programs"
SEEDS = (5, 4321)


def rows_of_versions(
    rank: int, world_size: int, program: str, versions: list[str], folder: Path
) -> list[list[Any]]:
    """For each version and seed, the tables that this rank's function returns the row of."""
    found = []
    for number, text in enumerate(versions):
        for seed in SEEDS:
            names = {"__name__": "program"}
            exec(compile(text, f"{program} {number}", "exec"), names)
            function = names["evaluate" if program == "evaluate" else "train"]
            stop = 48 // 4 // world_size + 1
            checkpoint = folder / f"{number}-{seed}.pt"
            runs: list[Any] = [seed]
            if program == "resume":
                run = argparse.Namespace
                runs = [
                    run(seed=seed, checkpoint=path, stop=at)
                    for path, at in ((None, None), (checkpoint, stop), (checkpoint, None))
                ]
            rows: list[Any] = []
            for argument in runs:
                dist.barrier()  # rank 0 has written the checkpoint
                try:
                    rows.append(function(argument, rank, world_size))
                except RuntimeError as error:
                    rows.append(str(error))
            found.append([row for row in rows if row])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("program", NAMES)
def test_the_check_accepts_a_program_and_sees_each_of_its_bugs(program, world_size, tmp_path):
    text = (PROGRAMS / f"{program}.py").read_text()
    bugs = [Bug("", "", "none"), *bugs_of(program)]
    versions = [text, *(with_bug(text, bug) for bug in bugs[1:])]
    of_ranks = run_ranks(rows_of_versions, world_size, program, versions, tmp_path, timeout=300)
    missed = []
    for number, runs in enumerate(zip(*of_ranks, strict=True)):
        bug, seed = bugs[number // len(SEEDS)], SEEDS[number % len(SEEDS)]
        tables = [list(rows) for rows in zip(*runs, strict=True)]
        raised = any(isinstance(row, str) for table in tables for row in table)
        said = "raises" if raised else faults(program, seed, tables)
        print(f"{program}, {world_size} ranks, seed {seed}: {bug.says}\n{said}")
        if bool(said) != bool(bug.right):
            missed.append(f"{bug.says} → {said or 'accepted'}")
    assert not missed, "\n".join(missed)
