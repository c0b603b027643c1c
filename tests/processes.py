"""Wait for what other processes do, and find those that a test started."""

import contextlib
import time
from collections.abc import Callable, Iterable

import psutil

# Seconds, for what has to begin before it is stopped: on a busy machine, not in the first of these.
LIMITS = (1.5, 15, 150)


def becomes(condition: Callable[[], object], within: float = 60.0) -> bool:
    """Whether `condition()` becomes true within that many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def processes_with(marker: str) -> list[psutil.Process]:
    """Every live process of this machine with `marker` among the values of its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if marker in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def all_gone(marker: str, within: float = 60.0) -> bool:
    """Whether the last of them ends within that many seconds."""
    return becomes(lambda: not processes_with(marker), within)


def all_end(pids: Iterable[int], within: float = 60.0) -> bool:
    """Whether each of these processes ends; a zombie has ended."""

    def runs(pid: int) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        return False

    left = list(pids)
    return becomes(lambda: not any(map(runs, left)), within)
