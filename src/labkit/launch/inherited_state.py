"""What a process hands on to a child: a fork of a server gets it from the process that asked."""

import contextlib
import os
import signal
import socket
import sys
import tempfile
from typing import NamedTuple, Self

_OUTPUTS = (1, 2)
# These have a meaning of their own in a fork, or cannot be changed.
_LEFT_ALONE = {signal.SIGINT, signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP}


class InheritedState(NamedTuple):
    """Everything but standard output and standard error, which are passed as open files."""

    path: list[str]  # sys.path
    folder: str
    environment: dict[str, str]
    limits: dict[str, tuple[int, int]]  # of resources: soft and hard
    ignored: set[int]  # signals
    cores: set[int]  # empty where the system does not say

    @classmethod
    def here(cls) -> Self:
        """Those of this process."""
        import resource  # Windows has none, and nothing that forks

        names = (name for name in dir(resource) if name.startswith("RLIMIT_"))
        return cls(
            list(sys.path),
            os.getcwd(),
            dict(os.environ),
            {name: resource.getrlimit(getattr(resource, name)) for name in names},
            {s for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN},
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(),
        )

    def apply(self) -> None:
        """Make them this process's."""
        import resource

        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None  # it is chosen anew, as the environment says
        with contextlib.suppress(OSError):  # it was removed
            os.chdir(self.folder)
        for name, limit in self.limits.items():
            if resource.getrlimit(getattr(resource, name)) != limit:
                with contextlib.suppress(OSError, ValueError):  # above this process's own
                    resource.setrlimit(getattr(resource, name), limit)
        for number in signal.valid_signals() - _LEFT_ALONE:
            if number in self.ignored:
                signal.signal(number, signal.SIG_IGN)
            elif signal.getsignal(number) == signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        if self.cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cores)


def open_outputs() -> None:
    """Open the null device for each of the standard files that is closed.

    Otherwise the next socket gets its number, and is handed on as an output.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= max(_OUTPUTS):
        os.set_inheritable(number, True)
    os.close(number)


def send_outputs(connection: socket.socket) -> None:
    """Send this process's standard output and error through a Unix socket. Does not wait."""
    socket.send_fds(connection, [b"\0"], _OUTPUTS)


def adopt_outputs(connection: socket.socket) -> None:
    """Receive what `send_outputs` sent, and make it this process's. EOFError: it is gone."""
    _, files, _, _ = socket.recv_fds(connection, 1, len(_OUTPUTS))
    if not files:
        raise EOFError
    for number, file in zip(_OUTPUTS, files, strict=True):
        os.dup2(file, number)
        os.close(file)
