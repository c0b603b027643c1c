"""Process cleanup: no rank, and nothing that a rank started, outlives the caller.

A process that is killed with SIGKILL cannot clean up. So a small guard process runs *between* the
caller and the work:

1. It runs in its own session, so a signal to the caller's process group does not reach it.
2. It adopts orphans (Linux: child subreaper), so it can find a daemon that left its parent and its
   session.
3. A pipe connects it to the caller, and no other process holds the caller's end. When the pipe
   closes, the caller has ended, for whatever reason. The guard then kills all its descendants and
   exits.

`labkit.launch.fork_server` and `labkit.launch.ranks` build on these functions. `run_guarded` puts
a guard around a command; `python -m labkit.launch.guard COMMAND…` is the guard itself.

Limits: macOS lacks step 2, so a daemon that changed its session may survive, and nothing here was
tested there. Windows lacks steps 1 and 2.
"""

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
    """Make this process the parent of every orphan below it. Returns whether the system can do
    that.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> bool:
    """Have the kernel kill this process when its parent ends. Returns whether the system can do
    that.
    """
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) if os.name == "posix" else False


def own_session() -> None:
    """Leave the caller's session, so that its Ctrl-C and its killpg do not reach the guard."""
    if hasattr(os, "setsid"):
        with contextlib.suppress(PermissionError):  # already the leader of a session
            os.setsid()


def has_children() -> bool:
    """Whether this process may have children, running or zombies; reaps the zombies."""
    if not hasattr(os, "WNOHANG"):
        return True
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def kill_descendants() -> None:
    """Kill and reap every process below this one. Costs one system call if there is none."""
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
    """Run `command` under a guard and capture its output as text, like `subprocess.run`.

    Nothing that the command started is left when this returns, when it raises
    `subprocess.TimeoutExpired` after `timeout` seconds, or when the calling process is killed.
    `options` are passed to `subprocess.Popen` (`cwd`, `env`). Costs about 0.1 s more than the
    command itself. Raises ValueError if the command is empty or a single string.
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
    """Reads a pipe to its end, so that a command with much output never blocks on it."""

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
