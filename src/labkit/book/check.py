"""Check a program of labs/programs or your own version of it, or plant a bug to look for.

    python -m labkit.book.check labs/programs/resume.py
    python -m labkit.book.check --plant 7 labs/programs/resume.py
    python -m labkit.book.check notebooks/resume_7.py
    python -m labkit.book.check --reveal notebooks/resume_7.py

The check runs the file under torchrun on 2 and on 3 ranks, with a seed that it draws. It computes
the same numbers in one process that has the samples of all ranks, and says which one differs.

A file is a version of the program whose name it begins with, up to an underscore and a number. It
takes `--seed N`, and prints a table last: the names of the columns, beginning with "rank", and one
line per rank. (`resume` also takes `--checkpoint FILE` and `--stop N`.)

--plant writes a copy with one of several bugs, chosen by NUMBER: two numbers in a row get different
ones. --reveal shows the bug of a copy. The exit code is 0 if all is right, 1 if the program is
not, and 2 for a command that makes no sense.
"""

import argparse
import math
import os
import random
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

from labkit.launch.arguments import positive
from labkit.launch.forks import NotStartedError
from labkit.launch.scripts import ScriptError, project_root, run_script

NAMES = ("evaluate", "resume", "mixed", "log_mean")
TIMEOUT = 120.0  # seconds, for one run
_NAME = re.compile(rf"({'|'.join(NAMES)})(?:_(\d+))?")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*.*")


Table = list[list[str]]


class Bug(NamedTuple):
    """A text of a program, what replaces it, and why that is wrong."""

    right: str
    wrong: str
    says: str


class NotYetError(Exception):
    """What is wrong with the program, in words."""


class CommandError(Exception):
    """What is wrong with the command, and what to do."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="for example labs/programs/resume.py")
    parser.add_argument("--ranks", type=int, choices=(2, 3, 4), help="default: 2, and then 3")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plant", type=positive, metavar="NUMBER", help="write a copy with a bug")
    what.add_argument("--reveal", action="store_true", help="show the bug of a copy")
    given = parser.parse_args()
    try:
        if given.plant is not None:
            print(plant(given.file, given.plant))
        elif given.reveal:
            print(reveal(given.file))
        else:
            check(given.file, [given.ranks] if given.ranks else [2, 3])
    except (CommandError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except NotYetError as error:
        sys.exit(f"Not yet. {error}")


def program_of(file: Path) -> tuple[str, int | None]:
    """The program that `file` is a version of, and the number in its name."""
    match = _NAME.fullmatch(file.stem)
    if not file.is_file():
        raise CommandError(f"{file} is not a file. The programs are in labs/programs.")
    if not match or file.suffix != ".py":
        raise CommandError(
            f"{file.name} is not a version of a program: its name has to be one of "
            f"{', '.join(f'{name}.py' for name in NAMES)}, or for example {NAMES[1]}_7.py."
        )
    return match[1], None if match[2] is None else int(match[2])


def bugs_of(program: str) -> list[Bug]:
    text = (project_root() / "labs/programs/bugs.toml").read_text()
    return [Bug(**bug) for bug in tomllib.loads(text)[program]]


def with_bug(text: str, bug: Bug) -> str:
    """Raises CommandError unless `text` has the bug's line once."""
    if text.count(bug.right) != 1:
        raise CommandError("This file was changed: plant bugs in the one of labs/programs.")
    return text.replace(bug.right, bug.wrong)


def plant(file: Path, number: int) -> str:
    """Write a copy of `file` with a bug into notebooks, which git ignores; say what to do next."""
    program, _ = program_of(file)
    bugs = bugs_of(program)
    planted = with_bug(file.read_text(), bugs[number % len(bugs)])
    copy = project_root() / "notebooks" / f"{program}_{number}.py"
    if copy.exists():
        raise CommandError(
            f"{os.path.relpath(copy)} is there already: remove it, or choose another number."
        )
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(planted)
    here, python = os.path.relpath(copy), os.path.relpath(sys.executable)
    return (
        f"{here} has a bug. Find it, repair it there, and run\n"
        f"    {python} -m labkit.book.check {here}"
    )


def reveal(file: Path) -> str:
    program, number = program_of(file)
    if number is None:
        raise CommandError(f"{file.name} has no number: --plant writes copies that have one.")
    bugs = bugs_of(program)
    bug = bugs[number % len(bugs)]
    lines = [*_diff("-", bug.wrong), *_diff("+", bug.right)]
    return "\n".join([*lines, bug.says])


def _diff(mark: str, text: str) -> list[str]:
    return [f"{mark} {line.strip()}" for line in text.splitlines() if line.strip()]


def check(file: Path, worlds: list[int]) -> None:
    """Run `file` on each number of ranks. Raises NotYetError with the first thing that is wrong."""
    program, _ = program_of(file)
    for world_size in worlds:
        seed = random.randrange(1, 100_000)
        try:
            wrong = faults(program, seed, tables_of(file, program, seed, world_size))
            if wrong:
                raise NotYetError(wrong)
        except NotYetError as error:
            said = f"On {world_size} ranks, with --seed {seed}:\n{error}"
            raise NotYetError(said) from None
        print(f"Right on {world_size} ranks, with --seed {seed}.", flush=True)


def tables_of(file: Path, program: str, seed: int, world_size: int) -> list[Table]:
    """The table that `file` prints; for `resume` also that of a run which stopped and resumed."""
    as_it_is = run(file, world_size, "--seed", seed)
    if program != "resume":
        return [table_in(as_it_is, program, world_size)]
    batches = 48 // 4 // world_size  # per epoch
    stop = batches + random.randrange(1, batches)  # in the middle of the second
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint.pt")
        resuming = ("--seed", seed, "--checkpoint", checkpoint)
        run(file, world_size, *resuming, "--stop", stop)
        if not checkpoint.is_file():
            raise NotYetError(f"It wrote no checkpoint with --stop {stop}.")
        resumed = run(file, world_size, *resuming)
    return [table_in(said, program, world_size) for said in (as_it_is, resumed)]


def run(file: Path, world_size: int, *arguments: object) -> str:
    """What `file` prints under torchrun. Nothing that it started is left."""
    try:
        return run_script(str(file.resolve()), *arguments, ranks=world_size, timeout=TIMEOUT)
    except (ValueError, NotStartedError) as error:
        raise CommandError(str(error)) from None
    except ScriptError as error:
        if error.exit_code is None:
            said = f"It had not ended after {TIMEOUT:g} s, and was stopped: does every rank call"
            raise NotYetError(f"{said} the same collectives in the same order?") from None
        found = _TRACEBACK.search(error.said)
        said = found[0] if found else "\n".join(str(error).splitlines()[-12:])
        raise NotYetError(f"It fails:\n{said}") from None


def table_in(output: str, program: str, world_size: int) -> Table:
    """The cells of the last table in `output`: a row per rank, without the ranks."""
    from labkit.book.expected import PROGRAMS  # imports torch

    columns = ["rank", *PROGRAMS[program].columns]
    lines = [line.split() for line in output.splitlines()]
    if columns not in lines:
        raise NotYetError(f"It prints no line with the names of the columns: {'  '.join(columns)}")
    first = len(lines) - lines[::-1].index(columns)
    rows = lines[first : first + world_size]
    if [row[:1] for row in rows] != [[str(rank)] for rank in range(world_size)] or any(
        len(row) != len(columns) for row in rows
    ):
        raise NotYetError(
            f"Below the names of the columns it needs {world_size} lines, one for each rank from 0 "
            f"to {world_size - 1}, with {len(columns)} cells each."
        )
    return [row[1:] for row in rows]


def faults(program: str, seed: int, tables: list[Table]) -> str:
    """What is wrong in the tables of `tables_of`, in words; empty if nothing is."""
    from labkit.book.expected import PROGRAMS

    columns, expected, tolerance = PROGRAMS[program]
    first, last = tables[0], tables[-1]
    wrong = [
        (name, rank, f"{cell} if stopped and resumed, {without} without a stop")
        for rank, rows in enumerate(zip(last, first, strict=True))
        for name, cell, without in zip(columns, *rows, strict=True)
        if cell != without
    ] or [
        (name, rank, f"{cell}, and expected {_shown(wanted)}")
        for rank, rows in enumerate(zip(first, expected(seed, len(first)), strict=True))
        for name, cell, wanted in zip(columns, *rows, strict=False)  # no number is a hash
        if not _is(cell, wanted, tolerance)
    ]
    if not wrong:
        return ""
    names = [name for name in columns if any(name == found for found, *_ in wrong)]
    said = [line for name in names for line in _of_ranks(name, len(first), wrong)]
    # What a run resumed with has one cause in most columns.
    cause = "weights" if "weights" in names and "steps" not in names else names[0]
    return "\n".join([*said, f"Look at {columns[cause]}."])


def _of_ranks(name: str, world_size: int, wrong: list[tuple[str, int, str]]) -> list[str]:
    """A line per rank for the column `name`; one line if all ranks have the same."""
    said = [(rank, text) for column, rank, text in wrong if column == name]
    if len(said) == world_size and len({text for _, text in said}) == 1:
        return [f"  every rank, {name}: {said[0][1]}"]
    return [f"  rank {rank}, {name}: {text}" for rank, text in said]


def _shown(wanted: float) -> str:
    return str(wanted) if isinstance(wanted, int) else f"{wanted:.6f}"


def _is(cell: str, wanted: float, tolerance: float) -> bool:
    try:
        found = float(cell)
    except ValueError:
        return False
    if isinstance(wanted, int):
        return found == wanted
    return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=1e-6)


if __name__ == "__main__":
    main()
