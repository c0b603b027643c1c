"""Nothing outlives its caller: not a rank, not what a rank started, not even after SIGKILL.

A process that is killed with SIGKILL cannot clean up, so somebody else has to. The somebody is a
small process *between* the caller and the work:

1. it sits in a session of its own, so that a signal to the caller's process group misses it;
2. it adopts the orphans of the work (Linux: child subreaper), so that a daemon which left its
   parent and its session is still found below it;
3. it holds one end of a pipe whose other end only the caller holds; when the pipe closes, however
   the caller ended, it kills everything below itself and leaves.

`labkit.launch.ranks` builds its supervisor on these functions. `run_guarded` puts the same guard
around a command; `python -m labkit.launch.guard COMMAND…` is the guard itself.

On macOS step 2 is not available (a daemon that changed its session may survive) and none of this
has been proved there; on Windows neither step 1 nor step 2 is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import psutil

# From <linux/prctl.h>; Python has no wrapper for prctl.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


def adopt_orphans() -> bool:
    """Make this process the new parent of every orphan below it. True where the system can."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> bool:
    """Ask the kernel to kill this process when its parent ends. True where the system can."""
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) if os.name == "posix" else False


def own_session() -> None:
    """Leave the caller's session, so that its Ctrl-C and its killpg do not reach the guard."""
    if hasattr(os, "setsid"):
        with contextlib.suppress(PermissionError):  # already the leader of a session
            os.setsid()


def has_children() -> bool:
    """False if this process certainly has no child left, running or zombie; reaps the zombies."""
    if not hasattr(os, "WNOHANG"):
        return True
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def kill_descendants() -> None:
    """Kill every process below this one and reap it. Costs one system call when there is none."""
    while has_children():
        below = psutil.Process().children(recursive=True)
        if not below:
            return
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=1)


def run_guarded(
    command: Sequence[str], timeout: float, **options: object
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(command)` with its output captured as text, and the guard around it.

    Whatever the command started is gone when this returns, raises `subprocess.TimeoutExpired`
    after `timeout` seconds, or when the calling process is killed. `options` go to
    `subprocess.Popen` (`cwd`, `env`). Costs about 0.1 s over the command itself. Raises ValueError
    for an empty command or one that is a single string.
    """
    if isinstance(command, str) or not command:
        raise ValueError(f"the command has to be a list of words, got {command!r}")
    guard = subprocess.Popen(
        [sys.executable, "-m", "labkit.launch.guard", *command],
        stdin=subprocess.PIPE,  # the pipe that tells the guard that we are gone
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        **options,
    )
    try:
        # communicate() closes stdin at once, which would end the guard: read by hand instead.
        streams = [_Drain(guard.stdout), _Drain(guard.stderr)]
        guard.wait(timeout)
        stdout, stderr = (stream.text() for stream in streams)
        return subprocess.CompletedProcess(command, guard.returncode, stdout, stderr)
    except subprocess.TimeoutExpired as expired:
        guard.stdin.close()
        guard.wait()
        output, stderr = (stream.text() for stream in streams)
        raise subprocess.TimeoutExpired(command, expired.timeout, output, stderr) from None
    finally:
        guard.stdin.close()
        guard.wait()
        guard.stdout.close()
        guard.stderr.close()


class _Drain(threading.Thread):
    """Reads a pipe to its end, so that a command which prints much never blocks on it."""

    def __init__(self, pipe) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self._text = ""
        self.start()

    def run(self) -> None:
        self._text = self._pipe.read()

    def text(self) -> str:
        # Only a process that escaped the guard could hold the pipe open beyond it.
        self.join(timeout=5)
        return self._text


def _guard(command: Sequence[str]) -> NoReturn:
    own_session()
    adopt_orphans()

    def leave_with_the_caller() -> None:
        # read() through os: a buffered reader blocked here would hold a lock that exit needs.
        while os.read(0, 4096):
            pass
        kill_descendants()
        os._exit(1)

    try:
        # If the guard itself is killed, the kernel ends the command. No thread runs here yet.
        die = die_with_parent if os.name == "posix" else None
        work = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)  # what a shell says for this
    threading.Thread(target=leave_with_the_caller, daemon=True).start()
    code = work.wait()
    kill_descendants()
    # A command ended by a signal ends the guard with the shell's code for it.
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _guard(sys.argv[1:])
