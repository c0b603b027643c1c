"""For how long ranks have not moved: whether they wait for each other forever.

Ranks that wait for each other forever look like ranks that wait for a slow one, until one looks at
all their threads. Between two looks, ranks are *still* if

- no thread has run, and each one sleeps: none computes, waits for a core or a disk, or is stopped;
- except gloo's loop, which wakes up every ten milliseconds to look for messages: it has run;
- no rank has read or written a byte, so no message has arrived;
- there are no other threads than the main one and those of torch, and no child processes: they
  could be what the ranks wait for, such as the modeled delay of a slow link.

A rank that sleeps is still, too, so its stack has to say that it waits for other ranks
(`labkit.launch.rank_states`). Works on Linux only: elsewhere, ranks are never still.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
