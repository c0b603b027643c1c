"""Start a process as a fork of a server that has already loaded torch.

    with forked(work, argument) as connection:   # runs work(their_end, argument) in a new process
        answer = connection.recv()

The server (Python's `multiprocessing.forkserver`) is started on first use and imports torch once,
which takes about a second. Each fork then takes milliseconds, where a new interpreter would import
torch again. The process must end when its end of the connection closes: that is how it learns that
its caller has left, for whatever reason.

Without os.fork (Windows), processes are spawned, which takes seconds.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

# Two threads that start a process take turns: starting changes global state of the interpreter.
_STARTING = threading.Lock()
# Seconds between attempts to start a process. A fork server that is ending refuses new processes;
# once it has ended, Python starts another one.
_PAUSES = (0.1, 0.5)


class NotStartedError(RuntimeError):
    """The operating system did not start the process; the text says why."""


def has_fork_server() -> bool:
    """Whether this system can fork processes from a server."""
    return "forkserver" in multiprocessing.get_all_start_methods()


@contextlib.contextmanager
def forked(target: Callable[..., None], *args: Any, name: str) -> Iterator[Connection]:
    """Run `target(connection, *args)` in a new process; give this process's end of the connection.

    On leaving, the connection is closed and the process is awaited: `target` must return soon after
    its end of the connection closes. `target` and `args` are pickled by name.

    Raises NotStartedError if no process can be started.
    """
    for pause in (*_PAUSES, None):
        context = _context()
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args), name=name)
        try:
            try:
                with _STARTING, _without_main():
                    process.start()
            except (EOFError, OSError) as error:
                if pause is None:
                    raise NotStartedError(f"{type(error).__name__}: {error}") from error
                time.sleep(pause)
                continue
            theirs.close()
            yield ours
            return
        finally:
            ours.close()
            theirs.close()
            if process.pid is not None:
                process.join()


def _context() -> Any:
    if not has_fork_server():
        warnings.warn(
            "this system has no fork server, so ranks are spawned: each call takes seconds, the "
            "report of a hang does not name the line at which it hangs, and processes that a rank "
            "starts outlive it. Linux and WSL do not have these limits.",
            stacklevel=_frames_of_labkit(),
        )
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    with _STARTING, _interrupt_held_back():
        _start_tracker()
        context.set_forkserver_preload([*_of_pytest(), "labkit.launch.rank_preload"])
        multiprocessing.forkserver.ensure_running()
    return context


# The process that is started forks and ends, so that nobody has to wait for the tracker's end.
_TRACKER = """import os; os.fork() and os._exit(0)
from multiprocessing.resource_tracker import main; main({})"""


def _start_tracker() -> None:
    """Start Python's resource tracker, which the fork server needs, in a session of its own.

    As a child, it would delay the end of a notebook's kernel. A kernel first sends SIGTERM to the
    children in its process group and waits for them, but the tracker ignores SIGTERM. After 2.5 s,
    Jupyter would kill the kernel, and the folder of the fork server's socket would remain. A
    tracker that a lock or a spawned process has started earlier still is such a child.
    """
    tracker = multiprocessing.resource_tracker._resource_tracker  # private: no public equivalent
    if tracker._fd is not None:
        return
    reading, writing = os.pipe()
    command = [multiprocessing.spawn.get_executable(), "-I", "-S", "-c", _TRACKER.format(reading)]
    try:
        subprocess.run(command, pass_fds=[reading], start_new_session=True, check=True, timeout=10)
        with tracker._lock:
            if tracker._fd is None:  # no other thread was faster
                tracker._fd, writing = writing, -1
    except (OSError, subprocess.SubprocessError):
        pass  # Python then starts one itself
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _of_pytest() -> list[str]:
    """Under pytest, the module that the functions of a test module refer to, once rewritten.

    pytest rewrites the assertions of such a module, and ranks get its functions by value.
    """
    rewrite = "_pytest.assertion.rewrite"
    return [rewrite] if rewrite in sys.modules else []


def _frames_of_labkit() -> int:
    """The `stacklevel` at which a warning of `_context` names the line that called into labkit."""
    level, frame = 1, sys._getframe(1)
    own = ("labkit.", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(own):
        level, frame = level + 1, frame.f_back
    return level


@contextlib.contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended; a process started in it has SIGINT blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script again in the new process.

    What runs there is pickled by name, so the script is not needed. Importing it would take its
    whole start-up time, and a script without an `if __name__ == "__main__"` guard would start
    itself again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
