"""Find the processes that a test started, by a marker in their environment."""

import time

import psutil


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
    deadline = time.monotonic() + within
    while processes_with(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
