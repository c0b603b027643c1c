"""What the doctor has started ends with it, and its folder goes, however it ends.

A process of its own reads from a pipe which sessions were started and which folders were made. At
the end of the pipe, the doctor's process is gone; then it kills those and removes these. Each
started process reports itself, so none is unknown, whenever its parent is killed. This file is run
as a script, by a bare interpreter.
"""

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "DDP_DOCTOR_GUARD"  # in a started process: the end of the pipe to write to
STARTED, ENDED, FOLDER = "started", "ended", "folder"
PATIENCE = 5.0  # seconds, because what is being killed may still write
SOCKETS = 76  # characters of a temporary folder in which a socket of multiprocessing has a path


class Guard:
    """The guard of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        reads, self.writes = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=reads,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reads)
        atexit.register(self._end)

    def tell(self, event: str, value: object) -> None:
        """One line; it is complete in the pipe, or not there."""
        with contextlib.suppress(OSError):
            os.write(self.writes, f"{event} {value}\n".encode())

    def _end(self) -> None:
        if os.getpid() == self.owner:
            os.close(self.writes)
            self.process.wait()


def guard() -> Guard:
    """The guard of this process, which starts with the first call."""
    return _guard_of(os.getpid())


@functools.cache
def _guard_of(process: int) -> Guard:
    return Guard()


def report() -> None:
    """In a started process, the first of its session: let the guard know it. Idempotent."""
    pipe = os.environ.pop(VARIABLE, "")
    if pipe:
        with contextlib.suppress(OSError):
            os.write(int(pipe), f"{STARTED} {os.getpid()}\n".encode())
            os.close(int(pipe))


@contextlib.contextmanager
def guarded_folder() -> Iterator[Path]:
    """A new folder, which goes however this process ends."""
    with tempfile.TemporaryDirectory(prefix="ddp-doctor-") as name:
        guard().tell(FOLDER, name)
        yield Path(name)


def temporary_folder(folder: Path) -> dict[str, str]:
    """The variable for a folder's own temporary folder, which goes with it."""
    path = folder / "tmp"
    path.mkdir(parents=True, exist_ok=True)
    return {"TMPDIR": str(path)}


def end_session(leader: int | str) -> None:
    """Kill all processes of a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(leader), signal.SIGKILL)


def end_all_of(folder: str | Path) -> None:
    """Kill all that was started with a variable that names a file in the folder (Linux)."""
    deadline = time.monotonic() + PATIENCE
    while (processes := list(_processes_with(f"{folder}/"))) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _processes_with(words: str) -> Iterator[int]:
    """The processes whose environment holds these words, in whatever session they are."""
    for process in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):
            if process.isdigit() and int(process) != os.getpid():
                with open(f"/proc/{process}/environ", "rb") as environ:
                    if os.fsencode(words) in environ.read():
                        yield int(process)


def main() -> None:
    """Wait for the end of the pipe, then clean up."""
    values: dict[str, set[str]] = {STARTED: set(), ENDED: set(), FOLDER: set()}
    for line in sys.stdin:
        event, _, value = line.rstrip("\n").partition(" ")
        values[event].add(value)
    for leader in values[STARTED] - values[ENDED]:
        end_session(leader)
    folders = list(filter(os.path.exists, values[FOLDER]))
    for folder in folders:
        end_all_of(folder)
    deadline = time.monotonic() + PATIENCE
    while any(map(os.path.exists, folders)) and time.monotonic() < deadline:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
