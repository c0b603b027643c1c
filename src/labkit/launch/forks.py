"""Run functions in processes that are forked: from this process, or from one with torch loaded.

    process = start_forked(work, argument, stdout=folder / "out", folder=folder)
    process.join(10)            # a time limit; process.exitcode is None if it still runs
    stop_forked(process)        # ends what is left of it, and all that it started

    with forked(work, argument) as connection:      # runs work(their_end, argument)
        answer = connection.recv()

`start_forked` forks the calling process, which should have no threads. `forked` asks a server that
has imported torch once, on first use; each fork then takes milliseconds. The server holds no port
and no file, and ends with the process that started it.

A process of `forked` is a supervisor: it leads a session of its own and adopts orphans, so when it
ends, nothing that it started is left. It has to return when its connection closes: that is how it
learns that its caller is gone, for whatever reason. It may start further processes with
`start_forked`; the kernel ends these if the supervisor is killed (`labkit.launch.guard`).
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import psutil

from labkit.launch.guard import adopt_orphans, die_with_parent, kill_descendants, own_session
from labkit.launch.memory import gather_memory, loading

# Seconds in which a supervisor ends after its caller has left. It is not waited for any longer.
_END_WITHIN = 20.0
_STARTED = "started"
_SERVER = "import sys; sys.path[:] = {}; from labkit.launch.forks import serve; serve({}, {})"


class NotStartedError(RuntimeError):
    """The operating system did not start the process; the text says why."""


def start_forked(
    target: Callable[..., object],
    *args: Any,
    stdout: Path | None = None,
    stderr: Path | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Run `target(*args)` in a fork of this process, as the leader of a new session.

    Its output, and that of programs which it starts, is appended to the files `stdout` and `stderr`
    (by default the same as `stdout`); None leaves it as it is here. `folder` is its working
    directory, and `environment` replaces the variables of this process.

    The result is a process of `multiprocessing`: `pid`, `join(timeout)`, `exitcode` (negative for a
    signal), and `sentinel`, which `multiprocessing.connection.wait` takes. Its exit code is 0 if
    `target` returns, 1 if it raises (the traceback goes to stderr), and what sys.exit says. It ends
    when this process ends. Torch's random state is this process's (`fresh_randomness`). End it with
    `stop_forked`, so that nothing is left of its session.

    Raises OSError if the system has no more processes.
    """
    place = (os.getpid(), stdout, stderr or stdout, folder, environment)
    process = multiprocessing.get_context("fork").Process(target=_begin, args=(place, target, args))
    process.start()
    return process


def _begin(place: tuple[Any, ...], target: Callable[..., object], args: tuple[Any, ...]) -> None:
    parent, stdout, stderr, folder, environment = place
    own_session()
    die_with_parent(parent)
    # What a new interpreter does at Ctrl-C; the fork server ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, number, path in (("stdout", 1, stdout), ("stderr", 2, stderr)):
        if path is not None:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, number)
            os.close(file)
            options = {"encoding": "utf-8", "errors": "replace", "closefd": False}
            setattr(sys, name, os.fdopen(number, "w", buffering=1, **options))
    if folder is not None:
        os.chdir(folder)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    target(*args)


def stop_forked(*processes: BaseProcess) -> None:
    """Kill processes of `start_forked`, with their sessions and all that runs below them.

    Returns when they have ended. A daemon that has left both is ended by `kill_descendants`, if
    this process adopts orphans, as a process of `forked` does.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
            process.kill()  # first, so that it starts no other
            for one in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def fresh_randomness() -> None:
    """Seed the random number generators of torch and numpy anew, as a new interpreter does.

    A fork begins with its parent's. (Python's own seeds itself anew in a fork.)
    """
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


class ForkServer:
    """A process that has imported torch and `modules`, and forks itself on request.

    It starts on first use and ends with this process, or with `stop`. If it was killed, the next
    call starts another.
    """

    def __init__(self, *modules: str) -> None:
        self.modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._starting = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The server's process; None before the first use."""
        return self._process.pid if self._process else None

    @contextlib.contextmanager
    def forked(self, target: Callable[..., None], *args: Any) -> Iterator[Connection]:
        """Run `target(connection, *args)` in a new process; give the other end of the connection.

        `target` and `args` are pickled by name; the new process has this one's sys.path and working
        directory. On leaving, the connection is closed and the end of the process is awaited.
        Raises NotStartedError if no process can be started.
        """
        ours = self._ask_for_a_fork()
        try:
            ours.send((sys.path, os.getcwd()))
            ours.send((target, args))
            yield ours
        finally:
            _await_end(ours)

    def stop(self) -> None:
        """End the server. Processes that it has forked go on."""
        with self._starting:
            if self._process is not None and self._requests is not None:
                self._requests.close()
                self._requests = None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=5)

    def _ask_for_a_fork(self) -> Connection:
        if not hasattr(os, "fork"):
            raise NotStartedError("this system cannot fork processes; on Windows, use WSL")
        reason = ""
        for _ in range(3):
            here, there = socket.socketpair()
            ours = Connection(here.detach())
            try:
                with self._starting, there:
                    socket.send_fds(self._running(), [b"\0"], [there.fileno()])
                if ours.recv() == _STARTED:
                    return ours
            except (EOFError, OSError) as error:  # it was killed, or cannot fork
                reason = f"{type(error).__name__}: {error}"
                self.stop()
                ours.close()
            except BaseException:
                ours.close()
                raise
        raise NotStartedError(reason)

    def _running(self) -> socket.socket:
        if self._requests is None:
            here, there = socket.socketpair()
            modules = [*self.modules, *_of_pytest()]
            command = _SERVER.format(sys.path, there.fileno(), modules)
            with there:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", command],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                    start_new_session=True,  # a notebook's kernel waits for children in its own
                )
            self._requests = here
            atexit.register(self.stop)
        return self._requests


_SHARED = ForkServer()
forked = _SHARED.forked


def _await_end(connection: Connection) -> None:
    """Say that nothing more will be sent, and wait until the other end's process has ended."""
    with connection, socket.socket(fileno=os.dup(connection.fileno())) as end:
        deadline = time.monotonic() + _END_WITHIN
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                end.settimeout(left)
                if not end.recv(2**20):
                    return


def _of_pytest() -> list[str]:
    """Under pytest, the module that the functions of a test module refer to, once rewritten.

    pytest rewrites the assertions of such a module, and ranks get its functions by value.
    """
    rewrite = "_pytest.assertion.rewrite"
    return [rewrite] if rewrite in sys.modules else []


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


def serve(requests: int, modules: list[str]) -> NoReturn:
    """Be the server: fork for every request that comes through the socket `requests`.

    torch._dynamo is loaded, because torch's DDP and optimizers import it on first use, which would
    cost every rank of every call one second.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = ("labkit.launch.supervisor", "labkit.launch.nodes")
    with loading():
        for name in ("torch._dynamo", "torch.distributed.run", *own, *modules):
            importlib.import_module(name)
    gather_memory()
    schedule_as_batch()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forks
    server = socket.socket(fileno=requests)
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, 1, 1)
        if not message:
            os._exit(0)
        with contextlib.suppress(OSError):  # no more processes: the caller sees a closed connection
            if os.fork() == 0:
                server.close()
                _supervise(descriptors[0])
        os.close(descriptors[0])


def _supervise(descriptor: int) -> NoReturn:
    """What a fork of the server does: become a supervisor, run what is asked for, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    own_session()
    adopt_orphans()
    os.set_inheritable(descriptor, False)
    caller = Connection(descriptor)
    code = 1
    try:
        caller.send(_STARTED)
        path, folder = caller.recv()
        sys.path[:] = path
        with contextlib.suppress(OSError):  # it was removed
            os.chdir(folder)
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
