"""Where ranks are, and whether they wait for each other forever.

A hang in data-parallel training raises one question: which rank waits in which collective, at
which line of my code? Every rank writes its stack on request (faulthandler), even while it is
blocked inside the communication library. `describe` reads such a stack.

Ranks that wait for each other forever look like ranks that wait for a slow one, until one looks at
all their threads. Between two looks, ranks are *still* if

- no thread has run, and each one sleeps: none computes, waits for a core or a disk, or is stopped;
- except gloo's loop, which wakes up every ten milliseconds to look for messages: it has run;
- no rank has read or written a byte, so no message has arrived;
- there are no other threads than the main one and those of torch, and no child processes: they
  could be what the ranks wait for, such as the modeled delay of a slow link.

A rank that sleeps is still, too, so its stack has to say that it waits for other ranks. Works on
Linux only: elsewhere, ranks are never still.
"""

import linecache
import os
import re
import site
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CELL = "<cell>"
STARTING = "waits for the other ranks to start"

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
# The innermost frame of a rank that waits in the wrapper's C++ code is in one of these files.
_WRAPPER = (
    os.path.join("torch", "distributed", "utils.py"),
    os.path.join("torch", "nn", "parallel", "distributed.py"),
)
_RENDEZVOUS = "init_process_group"
_BACKWARD = "_engine_run_backward"
_LIBRARIES = tuple(
    {*site.getsitepackages(), sysconfig.get_path("stdlib"), os.path.dirname(__file__)}
)


class Frame(NamedTuple):
    """One entry of a stack: file, line, and function."""

    file: str
    line: int
    function: str


class RankState(NamedTuple):
    """What a rank was doing when its stack was read."""

    text: str
    waits: bool


def is_readers_code(file: str) -> bool:
    """Whether `file` is the reader's own code (a cell, a script, a package) and not a library's."""
    return not file.startswith((*_LIBRARIES, "<frozen"))


def show_cells_as(text: str, cells: Mapping[str, str]) -> str:
    """`text` with `<cell>` instead of the temporary file names of notebook cells."""
    for file in cells:
        text = text.replace(file, CELL)
    return text


def read_stack(dump: str, main_thread: int) -> list[Frame]:
    """The main thread's frames in a faulthandler dump of all threads, innermost first."""
    frames: list[Frame] = []
    wanted = False
    for line in dump.splitlines():
        if "hread 0x" in line:
            wanted = int(line.split("0x")[1].split()[0], 16) == main_thread
            if wanted:  # a later dump of the same rank replaces an earlier one
                frames = []
        elif wanted and (found := _FRAME.match(line)):
            frames.append(Frame(found["file"], int(found["line"]), found["function"]))
    return frames


def describe(frames: list[Frame], cells: Mapping[str, str], home: str) -> RankState:
    """What a rank with this stack is doing, and at which line of the caller's code.

    `home` is the file of the function that run_ranks was given. Its innermost frame is the line
    that the reader knows. `cells` maps file names that exist only in the kernel to their text.
    """
    if not frames:
        return RankState("had not started", waits=False)
    action, waits = _action(frames, cells)
    where = next((f for f in frames if f.file == home or f.file in cells), None)
    # Files like <string> are the interpreter's own start.
    where = where or next((f for f in frames if is_readers_code(f.file) and f.file[0] != "<"), None)
    if where is None:
        return RankState(action, waits)
    name = CELL if where.file in cells else where.file
    source = _source(where, cells)
    return RankState(f"{action}, at {name} line {where.line}: {source}", waits)


def _action(frames: list[Frame], cells: Mapping[str, str]) -> tuple[str, bool]:
    """What the innermost frames are doing, and whether that is waiting for other ranks."""
    collective = None
    for frame in frames:
        # Of nested ones (all_gather_object calls all_gather) the caller wrote the outermost.
        if frame.file.endswith(_COLLECTIVES) and not frame.function.startswith("_"):
            collective = frame.function
        elif is_readers_code(frame.file):
            break
    if collective == _RENDEZVOUS:
        return STARTING, True
    if collective:
        return f"waits in {collective}", True
    if ".wait(" in _source(frames[0], cells):
        return "waits for a collective that it launched earlier", True
    if frames[0].function == _BACKWARD:
        return "is inside backward(), computing or waiting for an all-reduce of gradients", True
    if frames[0].file.endswith(_WRAPPER):
        return "waits in a collective of DistributedDataParallel", True
    return "still runs", False


def _source(frame: Frame, cells: Mapping[str, str]) -> str:
    if frame.file in cells:
        lines = cells[frame.file].splitlines()
        return lines[frame.line - 1].strip() if frame.line <= len(lines) else ""
    return linecache.getline(frame.file, frame.line).strip()


# Whether ranks have moved -------------------------------------------------------------------------

_POLLS = "gloo_tcp_loop"
_OF_TORCH = ("gloo_", "pt_")  # how torch's names of threads begin


class _Thread(NamedTuple):
    """A thread at one moment. `turns`: how often it has been given a core."""

    name: str
    sleeps: bool
    turns: int


class _Look(NamedTuple):
    """One process at one moment: its calls of read and write, and its threads by their ids."""

    calls: str
    threads: dict[str, _Thread]


class Stillness:
    """Watches the processes `pids`; call `seconds` several times a second."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = pids
        self._before: list[_Look] | None = None
        self._since = time.monotonic()

    def seconds(self) -> float:
        """For how long all processes have been still, as far as the calls of this method saw."""
        now, time_now = _look_at(self.pids), time.monotonic()
        if not now or not self._before or not all(map(_is_still, self._before, now)):
            self._since = time_now
        self._before = now
        return time_now - self._since


def _look_at(pids: Sequence[int]) -> list[_Look] | None:
    """None if a process has ended, or has threads or children that it may wait for."""
    looks = []
    try:
        for pid in pids:
            process, threads = Path("/proc", str(pid)), {}
            for task in (process / "task").iterdir():
                name = (task / "comm").read_text().strip()
                foreign = task.name != str(pid) and not name.startswith(_OF_TORCH)
                if foreign or (task / "children").read_text():
                    return None
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                turns = int((task / "schedstat").read_text().split()[2])
                threads[task.name] = _Thread(name, state == "S", turns)
            calls = [line for line in (process / "io").read_text().splitlines() if "sysc" in line]
            looks.append(_Look(" ".join(calls), threads))
    except (OSError, ValueError, IndexError):  # it has ended, or this system does not say
        return None
    return looks


def _is_still(before: _Look, now: _Look) -> bool:
    if before.calls != now.calls or before.threads.keys() != now.threads.keys():
        return False
    pairs = [(before.threads[one], now.threads[one]) for one in now.threads]
    return all(
        new.turns > old.turns if new.name == _POLLS else new.sleeps and new.turns == old.turns
        for old, new in pairs
    )
