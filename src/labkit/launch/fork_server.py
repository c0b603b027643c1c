"""The server's side of `labkit.launch.forks`: a process that loads torch once and forks itself.

It runs no thread, and never waits for a process that asks. The kernel queues those that connect;
for each, the server forks, and all else is the fork's. So it serves many at the same time.

Its socket is a file in a folder that only this user can enter, on this machine, outside of other
containers.
"""

import contextlib
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from labkit.launch.guard import adopt_orphans, kill_descendants, own_session
from labkit.launch.memory import gc_paused, use_huge_pages

STARTED = "started"
OUTPUTS = (1, 2)  # file descriptors
_WAITING = 4096  # connections that may wait to be accepted
# torch's DDP and optimizers import torch._dynamo on first use, which would cost every rank of every
# call one second.
LOADED = (
    "torch._dynamo",
    "torch.distributed.run",
    "labkit.launch.supervisor",
    "labkit.launch.nodes",
)
_lifeline: socket.socket | None = None  # in a server and its forks: closed when its maker ends
# What a new interpreter finds in sys.path, without PYTHONPATH. Its callers' goes beyond that.
FRESH_PATH = [
    path
    for path in sys.path
    if path and path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
]


def listen(address: str) -> socket.socket:
    """Listen at `address`. Raises OSError if another process does."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
        listener.listen(_WAITING)
    except BaseException:
        listener.close()
        raise
    return listener


def open_outputs() -> None:
    """Open the null device for each of the standard files that is closed.

    Otherwise the next socket gets its number, and is handed on as an output.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= max(OUTPUTS):
        os.set_inheritable(number, True)
    os.close(number)


def serve(listener: int, lifeline: int, address: str, modules: Sequence[str]) -> NoReturn:
    """Be the server: fork for every connection to `listener`, until the other end of `lifeline` is
    closed.
    """
    open_outputs()  # a file that Python opens in a closed one's place is not inherited
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _load(*LOADED, *modules)
    use_huge_pages()
    schedule_as_batch()
    _serve(socket.socket(fileno=listener), socket.socket(fileno=lifeline), address)


def _load(*modules: str) -> None:
    with gc_paused():
        for name in modules:
            importlib.import_module(name)


def _serve(listener: socket.socket, lifeline: socket.socket, address: str) -> NoReturn:
    """Never waits for a process that asks: its fork does."""
    global _lifeline
    _lifeline = lifeline
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forks
    while lifeline not in wait([listener, lifeline]):
        with contextlib.suppress(OSError):  # no more processes: the caller sees the end
            caller, _ = listener.accept()
            with caller:
                if os.fork() == 0:
                    listener.close()
                    _supervise(caller)
    shutil.rmtree(Path(address).parent, ignore_errors=True)
    os._exit(0)


def _supervise(connection: socket.socket) -> NoReturn:
    """What a fork of the server does: become a supervisor, run what is asked for, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    own_session()
    adopt_orphans()
    code = 1
    try:
        _adopt_outputs(connection)
        caller = Connection(connection.detach())
        caller.send(STARTED)
        if state := caller.recv():
            _adopt_state(*state)
        target, args = caller.recv()
        target(caller, *args)
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the caller is gone
    except BaseException:
        traceback.print_exc()
    finally:
        kill_descendants()
        os._exit(code)


def _adopt_outputs(connection: socket.socket) -> None:
    """Make the caller's standard output and error this process's. EOFError: it is gone."""
    _, files, _, _ = socket.recv_fds(connection, 1, len(OUTPUTS))
    if not files:
        raise EOFError
    for number, file in zip(OUTPUTS, files, strict=True):
        os.dup2(file, number)
        os.close(file)


def _adopt_state(path: list[str], folder: str, environment: Mapping[str, str]) -> None:
    """Make the caller's sys.path, working directory, and environment this process's."""
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is chosen anew, as the environment says
    with contextlib.suppress(OSError):  # it was removed
        os.chdir(folder)


def extend(caller: Connection, address: str, path: list[str], modules: Sequence[str]) -> None:
    """Make this fork of a shared server a server itself, which has more modules."""
    import fcntl  # Windows has none, and nothing that forks

    lock = open(f"{address}.lock", "w")  # noqa: SIM115, held until this process ends
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(address).unlink(missing_ok=True)  # of one that was killed
        listener = listen(address)
    except OSError:  # another one does
        return
    with caller:
        caller.send(STARTED)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):  # the first caller may wait for their end
        os.dup2(nowhere, number)
    sys.path[:] = path
    _load(*modules)
    _serve(listener, _lifeline, address)


def schedule_as_batch() -> None:
    """Use SCHED_BATCH for this thread, and for threads and processes that it starts from now on.

    Otherwise gloo's thread that waits for the sockets interrupts another one, which may hold the
    lock of that very connection. `Pair::handleEvents` (gloo/transport/tcp/pair.cc) then fails to
    take the lock and is called again at once, until its time slice ends after some milliseconds.
    Measured on two cores, for an all-reduce of ten numbers: 0.2 ms instead of 1.3 on two ranks, 0.7
    instead of 3.8 on four. Needs no privilege; macOS has no such policy.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
