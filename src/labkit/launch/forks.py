"""Run functions in processes that are forked: from this process, or from one with torch loaded.

    process = start_forked(work, argument, stdout=folder / "out", folder=folder)
    process.join(10)            # a time limit; process.exitcode is None if it still runs
    stop_forked(process)        # ends what is left of it, and all that it started

    with forked(work, argument) as connection:      # runs work(their_end, argument)
        answer = connection.recv()

`start_forked` forks the calling process, which should have no threads. `forked` asks a server that
has imported torch once, on first use; each fork then takes milliseconds. The server holds no port,
and ends with the process that started it. By default that is the process that asks; all that are
started inside `shared_server` ask the same one.

A process of `forked` is a supervisor: it leads a session of its own and adopts orphans, so when it
ends, nothing that it started is left. It has to return when its connection closes: that is how it
learns that its caller is gone, for whatever reason. It may start further processes with
`start_forked`; the kernel ends these if the supervisor is killed (`labkit.launch.guard`).
"""

import atexit
import contextlib
import hashlib
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from labkit.launch.fork_server import OUTPUTS, extend, listen, open_outputs
from labkit.launch.guard import die_with_parent, own_session

# Seconds in which a supervisor ends after its caller has left. It is not waited for any longer.
_END_WITHIN = 20.0
_START_WITHIN = 300.0  # seconds; a server that is asked for the first time has to load torch
SHARED = "LABKIT_FORK_SERVER"  # environment variable: whose server it is, and its address
_SERVER = """
import select, shutil, sys
if {1} not in select.select([{0}, {1}], [], [])[0]:
    from labkit.launch.fork_server import serve
    sys.path[:] = {path}
    serve(*{arguments})
shutil.rmtree({folder!r}, ignore_errors=True)  # nobody has asked
"""


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
        # Line by line, whatever PYTHONUNBUFFERED said to the server: lines of several processes
        # would be mixed up.
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

    Inside `shared_server`, this process and the others there ask the same one. Otherwise it starts
    on first use, and ends with this process or with `stop`. If it was killed, the next call starts
    another.
    """

    def __init__(self, *modules: str) -> None:
        self.modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._address = ""
        self._starting = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The server's process; None before it is started here."""
        return self._process.pid if self._process else None

    @contextlib.contextmanager
    def forked(
        self, target: Callable[..., None], *args: Any, outputs: Sequence[int] = OUTPUTS
    ) -> Iterator[Connection]:
        """Run `target(connection, *args)` in a new process; give the other end of the connection.

        `target` and `args` are pickled by name. The new process has this one's environment,
        working directory, sys.path, and `outputs`, by default standard output and standard error.
        On leaving, the connection is closed and the end of the process is awaited. Raises
        NotStartedError if no process can be started.
        """
        ours = self._ask_for_a_fork(outputs)
        try:
            ours.send((sys.path, os.getcwd(), dict(os.environ)))
            ours.send((target, args))
            yield ours
        finally:
            _await_end(ours)

    def start(self) -> str:
        """Start the server, if it does not run, and return its address.

        It loads nothing before it is asked for the first time.
        """
        with self._starting:
            if self._lifeline is None:
                self._start()
            return self._address

    def stop(self) -> None:
        """End the server. Processes that it has forked go on."""
        with self._starting:
            if self._process is not None and self._lifeline is not None:
                self._lifeline.close()
                self._lifeline = None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=5)
                shutil.rmtree(Path(self._address).parent, ignore_errors=True)

    def _ask_for_a_fork(self, outputs: Sequence[int]) -> Connection:
        if not hasattr(os, "fork"):
            raise NotStartedError("this system cannot fork processes; on Windows, use WSL")
        if shared := _shared_address():
            with contextlib.suppress(EOFError, OSError):
                return _ask_shared(shared, self.modules, outputs)
        reason = ""
        for _ in range(3):
            try:
                return _ask(self.start(), outputs)
            except (EOFError, OSError) as error:  # it was killed, or cannot fork
                reason = f"{type(error).__name__}: {error}"
                self.stop()
        raise NotStartedError(reason)

    def _start(self) -> None:
        open_outputs()
        # The path of a socket has at most 100 characters, and TMPDIR may be long.
        folder = tempfile.mkdtemp(prefix="labkit-", dir="/tmp")
        self._address = f"{folder}/server"
        here, there = socket.socketpair()
        with there, listen(self._address) as listener:
            files = listener.fileno(), there.fileno()
            modules = [*self.modules, *_of_pytest()]
            arguments = (*files, self._address, modules)
            command = _SERVER.format(*files, path=sys.path, arguments=arguments, folder=folder)
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
                start_new_session=True,  # a notebook's kernel waits for children in its own
            )
        self._lifeline = here
        atexit.register(self.stop)


OF_THIS_PROCESS = ForkServer()
forked = OF_THIS_PROCESS.forked


@contextlib.contextmanager
def shared_server() -> Iterator[None]:
    """Inside the block, this process and all that it starts ask one server, by a variable.

    The server ends with the block, or with this process. A process that cannot reach it, or that
    runs in another Python environment, starts its own.
    """
    if _shared_address():
        yield
        return
    server, before = ForkServer(), os.environ.get(SHARED)
    os.environ[SHARED] = f"{_this_python()}:{server.start()}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SHARED]
        else:
            os.environ[SHARED] = before
        server.stop()


def _this_python() -> str:
    """What a server's modules depend on: two processes with the same one can share it."""
    return _short(f"{sys.version} {sys.prefix} {__file__}")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_shared() -> bool:
    """Whether this process was told of a server that it shares."""
    return bool(_shared_address())


def _shared_address() -> str:
    """The address of the server that this process shares with others, or an empty string."""
    python, _, address = os.environ.get(SHARED, "").partition(":")
    return address if python == _this_python() else ""


def _ask(address: str, outputs: Sequence[int] = OUTPUTS) -> Connection:
    """A new fork of the server there. Raises OSError or EOFError if it cannot be reached."""
    open_outputs()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"\0"], outputs)
        ours = Connection(connection.detach())
    try:
        if not ours.poll(_START_WITHIN):
            raise TimeoutError(f"no answer in {_START_WITHIN:g} s")
        ours.recv()
    except BaseException:
        ours.close()
        raise
    return ours


def _ask_shared(address: str, modules: Sequence[str], outputs: Sequence[int]) -> Connection:
    """The same, of a shared server, or of one that is forked from it and has `modules`, too."""
    if not modules:
        return _ask(address, outputs)
    extended = f"{address}-{_short(' '.join(modules))}"
    with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        return _ask(extended, outputs)
    with _ask(address) as fork:
        # The state of the server: it will be that of other callers' forks.
        fork.send(None)
        fork.send((extend, (extended, sys.path, modules)))
        with contextlib.suppress(EOFError):  # another process was first
            fork.recv()
    return _ask(extended, outputs)


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
