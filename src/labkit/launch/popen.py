"""A fork of a server, to be looked after as a `subprocess.Popen` is."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from labkit.launch.fork_server import OUTPUTS
from labkit.launch.forks import ForkServer, start_forked
from labkit.launch.guard import has_children

_LOOK_EVERY = 0.5  # seconds


class ForkedPopen:
    """Runs a function in a fork of a server.

    The process, with all that it started, ends when this object's process ends, or with `close`.
    """

    stdin = stdout = stderr = None  # it inherits them

    def __init__(
        self,
        server: ForkServer,
        target: Callable[..., object],
        *args: Any,
        linger: float = 0.0,
        outputs: Sequence[int] = OUTPUTS,
        **place: Any,
    ) -> None:
        """Start `target(*args)`, pickled by name; `place` is handed to `start_forked`.

        It prints into `outputs`, unless `place` names files. What it leaves behind gets `linger`
        seconds to end. Raises NotStartedError, EOFError, or OSError.
        """
        self.returncode: int | None = None  # negative for a signal
        with contextlib.ExitStack() as fork:
            forked = server.forked(_supervise, target, args, place, linger, outputs=outputs)
            self._connection = fork.enter_context(forked)
            self.pid: int = self._connection.recv()
            self._fork = fork.pop_all()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, once it has ended; None if that takes longer than `timeout` seconds."""
        if self.returncode is None and self._connection.poll(timeout):
            try:
                self.returncode = self._connection.recv()
            except (EOFError, OSError):
                self.returncode = -signal.SIGKILL
            self.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and those of its group."""
        if self.poll() is None:
            with contextlib.suppress(OSError):
                self._connection.send(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End it, and wait for its end."""
        self._fork.close()


def run_forked(
    server: ForkServer,
    target: Callable[[list[str]], object],
    words: Sequence[str],
    timeout: float,
    cwd: Path,
    env: Mapping[str, str],
    linger: float = 0.0,
) -> "subprocess.CompletedProcess[str]":
    """Run `target(words)` in a fork of `server`, and capture what it prints.

    What it leaves behind, such as the doctor's watcher, gets `linger` seconds to end. Nothing that
    it started is left when this returns, raises, or when the caller is killed. Raises
    subprocess.TimeoutExpired after `timeout` seconds, and `labkit.launch.forks.NotStartedError` if
    no process can be started.
    """
    # Without a name: nothing of them is left, however this process ends.
    text = {"mode": "w+", "encoding": "utf-8", "errors": "replace"}
    with tempfile.TemporaryFile(**text) as stdout, tempfile.TemporaryFile(**text) as stderr:
        place = {"folder": cwd, "environment": env, "outputs": (stdout.fileno(), stderr.fileno())}
        with contextlib.closing(
            ForkedPopen(server, target, list(words), linger=linger, **place)
        ) as process:
            code = process.wait(timeout)
        # Read only now: closing it ended every process that could still write.
        for file in (stdout, stderr):
            file.seek(0)
        said = stdout.read(), stderr.read()
    if code is None:
        raise subprocess.TimeoutExpired(list(words), timeout, *said)
    return subprocess.CompletedProcess(list(words), shells(code), *said)


def shells(code: int) -> int:
    """What a shell says for an exit code, which is negative for a signal."""
    return code if code >= 0 else 128 - code


def _supervise(
    caller: Connection,
    target: Callable[..., object],
    args: tuple[Any, ...],
    place: dict[str, Any],
    linger: float,
) -> None:
    process = start_forked(target, *args, **place)
    caller.send(process.pid)
    while process.exitcode is None:
        # A child of the process may hold its sentinel open, so look from time to time, too.
        if caller in wait([caller, process.sentinel], timeout=_LOOK_EVERY):
            number = caller.recv()
            if process.exitcode is None:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # just started, it leads no group yet
                    os.kill(process.pid, number)
    deadline = time.monotonic() + linger
    while time.monotonic() < deadline and has_children():
        if caller.poll(0.02):
            caller.recv()  # raises EOFError if the caller has left
    caller.send(process.exitcode)
