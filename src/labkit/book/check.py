"""Check a program of labs/programs or your own version of it, or plant a bug to look for.

    python -m labkit.book.check labs/programs/resume.py
    python -m labkit.book.check --plant 7 labs/programs/resume.py
    python -m labkit.book.check notebooks/resume_7.py
    python -m labkit.book.check --reveal notebooks/resume_7.py

The check runs the file on 2, 3, and 4 ranks, as torchrun does, with seeds that it draws. It
computes the same numbers in one process that has the samples of all ranks, and says which number
differs on which ranks. It also says which rank failed, or where each one waits.

A file is a version of the program whose name it begins with, up to an underscore and a number. It
takes `--seed N`, and prints a table last: the names of the columns, beginning with "rank", and one
line per rank. (`resume` also takes `--checkpoint FILE` and `--stop N`.) Print in a row what its own
rank computed: the check cannot see what a table with copies of rank 0's row hides, and it counts no
messages.

--plant writes a copy with one of several bugs, chosen by NUMBER: two numbers in a row get different
ones. --reveal shows the bug of a copy. The exit code is 0 if all is right, 1 if the program is
not, and 2 for a command that makes no sense.
"""

import argparse
import contextlib
import io
import math
import os
import random
import re
import resource
import runpy
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from labkit.book.expected import PROGRAMS
from labkit.launch.arguments import positive
from labkit.launch.nodes import reserved_port
from labkit.launch.rank_states import is_readers_code
from labkit.launch.ranks import RanksError, RanksTimeoutError, run_ranks
from labkit.launch.scripts import project_root

NAMES = tuple(PROGRAMS)
WORLDS = (2, 3, 4)
STOPS = "in an epoch", "at an epoch's end"  # of `resume`
CHANGED = "This file was changed: plant bugs in the one of labs/programs."
TIMEOUT = 60.0  # seconds, for one run
_STUCK_AFTER = 4.0  # seconds
_LARGEST_FILE = 16 * 2**20  # bytes that a rank may print, or a checkpoint may have
_NAME = re.compile(rf"({'|'.join(NAMES)})(?:_([0-9]+))?")
_OF_RANK = re.compile(r"^\[rank \d+\] ?", re.M)
_FRAME = re.compile(r'^  File "(.*)", line .*\n(?:    .*\n)*', re.M)

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
    parser.add_argument("--ranks", type=positive, choices=WORLDS, help="default: on each")
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
            check(given.file, [given.ranks] if given.ranks else WORLDS)
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
        raise CommandError(CHANGED)
    return text.replace(bug.right, bug.wrong)


def plant(file: Path, number: int) -> str:
    """Write a copy of `file` with a bug into notebooks, which git ignores; say what to do next."""
    program, of_copy = program_of(file)
    if of_copy is not None:
        raise CommandError(CHANGED)
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


def check(file: Path, worlds: Sequence[int]) -> None:
    """Run `file` on each number of ranks. Raises NotYetError with the first thing that is wrong."""
    program, _ = program_of(file)
    if re.search(r"^\s*(?:from|import) labkit\b", file.read_text("utf-8", "replace"), re.M):
        raise NotYetError("It imports labkit, which knows what is right: compute that in the file.")
    for world_size in worlds:
        seed = random.randrange(1, 100_000)
        try:
            if wrong := faults(program, seed, tables_of(file, program, seed, world_size)):
                raise NotYetError(wrong)
        except NotYetError as error:
            said = f"On {world_size} ranks, with --seed {seed}:\n{error}"
            raise NotYetError(said) from None
        print(f"Right on {world_size} ranks, with --seed {seed}.", flush=True)


def tables_of(file: Path, program: str, seed: int, world_size: int) -> list[Table]:
    """The table that `file` prints; for `resume` also those of runs which stop as in `STOPS`."""
    printed, steps = run(file, world_size, seed)
    tables = [table_in(printed, program, world_size)]
    if program == "resume":
        batches = 48 // 4 // world_size  # per epoch
        for stop in (batches + random.randrange(1, batches), batches):
            printed = _resumed(file, world_size, seed, stop, steps)
            tables.append(table_in(printed, program, world_size))
    return tables


def _resumed(file: Path, world_size: int, seed: int, stop: int, steps: int) -> str:
    """What `file` prints if it stops after `stop` of its `steps` and resumes."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint.pt")
        resuming = ("--checkpoint", checkpoint)
        _, before = run(file, world_size, seed, *resuming, "--stop", stop)
        if before > stop:
            raise NotYetError(f"With --stop {stop}, it takes {before} steps.")
        if not checkpoint.is_file():
            raise NotYetError(f"It writes no checkpoint with --stop {stop}.")
        printed, after = run(file, world_size, seed, *resuming)
    if after >= steps > 0:
        raise NotYetError(f"With the checkpoint of step {stop}, it takes {after} steps again.")
    return printed


class _Program:
    """A file as a program of several ranks.

    A class, because the engine shows lines of the file in which a function is written.
    """

    def __init__(self, path: str, words: list[str], port: int) -> None:
        self.path, self.words, self.port = path, words, port

    def __call__(self, rank: int, world_size: int) -> int:
        """Run it with torchrun's environment; returns how many steps its optimizers took."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
        dist.destroy_process_group()  # it makes one of its own
        place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": self.port}
        place |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in place.items()}
        sys.argv, sys.path[0] = [self.path, *self.words], os.path.dirname(self.path)
        steps: list[None] = []
        register_optimizer_step_post_hook(lambda *_: steps.append(None))
        process = os.getpid()
        try:
            runpy.run_path(self.path, run_name="__main__")
        except SystemExit as leave:
            if leave.code:
                raise
        finally:
            if os.getpid() != process:  # it has forked itself
                os._exit(0)
        return len(steps)


def run(file: Path, world_size: int, seed: int, *more: object) -> tuple[str, int]:
    """What all ranks of `file` print, and the most steps that one rank's optimizers take.

    Nothing that it started is left. Raises NotYetError if a rank fails, or the ranks hang.
    """
    written, path = io.StringIO(), str(file.resolve())
    words = [str(word) for word in ("--seed", seed, *more)]
    try:
        with (
            reserved_port() as port,
            contextlib.redirect_stdout(written),
            contextlib.redirect_stderr(written),
        ):
            program = _Program(path, words, port)
            steps = run_ranks(
                program, world_size, timeout=TIMEOUT, stuck_after=_STUCK_AFTER, device="cpu"
            )
    except Exception as error:
        said = _failure(error, _OF_RANK.sub("", written.getvalue())).replace(path, str(file))
        raise NotYetError(f"With {' '.join(words[2:])}:\n{said}" if more else said) from None
    printed = _OF_RANK.sub("", written.getvalue())
    if more := re.search("^… (.* more bytes), not shown$", printed, re.M):
        raise NotYetError(f"It prints too much: {more[1]} than are read.")
    return printed, max(steps)


def _failure(error: Exception, printed: str) -> str:
    """Why ranks failed or hang, in words. Raises what the program did not cause."""
    if notes := getattr(error, "__notes__", None):  # of the rank that raised
        ours = {f for f in _FRAME.findall(notes[-1]) if f == __file__ or not is_readers_code(f)}
        return _FRAME.sub(lambda frame: frame[0] * (frame[1] not in ours), notes[-1])
    if not isinstance(error, RanksError) or not error.states:
        raise CommandError(str(error)) if isinstance(error, ValueError | RanksError) else error
    said = str(error).partition("\nNext: ")[0]
    if not isinstance(error, RanksTimeoutError):
        return "\n".join([said, *printed.strip().splitlines()[-5:]])
    same = "\nEvery rank has to call the same collectives in the same order."
    return f"It hangs: {said}{same * (' waits in ' in said)}"


def table_in(output: str, program: str, world_size: int) -> Table:
    """The cells of the last table in `output`: a row per rank, without the ranks."""
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
    columns, expected, tolerance = PROGRAMS[program]
    first, *resumed = tables
    differ = (pair for pair in zip(STOPS, resumed, strict=False) if pair[1] != first)
    place, last = next(differ, ("", first))
    hashes: list[float | str] = [*first[0]]  # what no number is, rank 0 has like all others
    wrong = [
        (name, rank, f"{cell} if stopped {place} and resumed, {without} without a stop")
        for rank, rows in enumerate(zip(last, first, strict=True))
        for name, cell, without in zip(columns, *rows, strict=True)
        if cell != without
    ] or [
        (name, rank, f"{cell}; {_shown(wanted)}")
        for rank, (cells, row) in enumerate(zip(first, expected(seed, len(first)), strict=True))
        for name, cell, wanted in zip(columns, cells, [*row, *hashes[len(row) :]], strict=True)
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
    """What is wrong in the column `name`: a line for all ranks of which the same is said."""
    ranks_of: dict[str, list[int]] = {}
    for column, rank, text in wrong:
        if column == name:
            ranks_of.setdefault(text, []).append(rank)
    only = " only" * (sum(map(len, ranks_of.values())) < world_size)
    said = []
    for text, ranks in ranks_of.items():
        who = f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}{only}"
        said.append(f"  {'every rank' if len(ranks) == world_size else who}, {name}: {text}")
    return said


def _shown(wanted: float | str) -> str:
    if isinstance(wanted, str):  # a hash
        return f"rank 0 has {wanted}"
    return f"one process computes {wanted if isinstance(wanted, int) else f'{wanted:.6f}'}"


def _is(cell: str, wanted: float | str, tolerance: float) -> bool:
    if isinstance(wanted, str):
        return cell == wanted
    try:
        found = float(cell)
    except ValueError:
        return False
    if isinstance(wanted, int):
        return found == wanted
    return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=1e-6)


if __name__ == "__main__":
    main()
