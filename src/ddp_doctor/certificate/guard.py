"""What a certificate has started ends with it, and its folder goes, however it ends.

A process of its own reads from a pipe which sessions were started and which folders were made. At
the end of the pipe, the certificate's process is gone; then it kills those and removes these. Each
started process reports itself, so none is unknown, whenever its parent is killed. This file is run
as a script, by a bare interpreter.
"""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

VARIABLE = "DDP_DOCTOR_GUARD"  # in a started process: the end of the pipe to write to
STARTED, ENDED, FOLDER = "started", "ended", "folder"


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

    def tell(self, what: str, value: object) -> None:
        """One line; it is complete in the pipe, or not there."""
        with contextlib.suppress(OSError):
            os.write(self.writes, f"{what} {value}\n".encode())

    def _end(self) -> None:
        if os.getpid() == self.owner:
            os.close(self.writes)
            self.process.wait()


_guards: list[Guard] = []


def guard() -> Guard:
    """The guard of this process, which starts with the first call."""
    if not _guards or _guards[-1].owner != os.getpid():
        _guards[:] = [Guard()]
    return _guards[-1]


def report() -> None:
    """In a started process, the first of its session: let the guard know it. Idempotent."""
    pipe = os.environ.pop(VARIABLE, "")
    if pipe:
        with contextlib.suppress(OSError):
            os.write(int(pipe), f"{STARTED} {os.getpid()}\n".encode())
            os.close(int(pipe))


def _given(folder: str) -> Iterator[int]:
    """The processes whose environment names the folder, in whatever session they are (Linux)."""
    for process in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):
            if process.isdigit() and int(process) != os.getpid():
                with open(f"/proc/{process}/environ", "rb") as environ:
                    if os.fsencode(f"{folder}/") in environ.read():
                        yield int(process)


def main() -> None:
    """Wait for the end of the pipe, then clean up."""
    told: dict[str, list[str]] = {STARTED: [], ENDED: [], FOLDER: []}
    for line in sys.stdin:
        what, _, value = line.rstrip("\n").partition(" ")
        told[what].append(value)
    for session in set(told[STARTED]) - set(told[ENDED]):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(session), signal.SIGKILL)
    until = time.monotonic() + 5.0  # what is being killed may still write
    for folder in told[FOLDER]:
        for process in _given(folder) if os.path.exists(folder) else ():
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
    while any(map(os.path.exists, told[FOLDER])) and time.monotonic() < until:
        for folder in told[FOLDER]:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
