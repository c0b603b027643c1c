"""Processes of a certificate that are forks of this one, which has loaded torch and the doctor.

A new interpreter takes four seconds of processor time to import torch, and what a step imports of
it; a fork takes milliseconds.
"""

import atexit
import functools
import importlib
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ddp_doctor.certificate import child
from ddp_doctor.certificate.guard import guard

# DDP and optimizers import the first, later; each start imports the third, and `judge` the last.
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "ddp_doctor.certificate.loaders",
    "ddp_doctor.certificate.verdict",
)


class Fork:
    """A process of the script; what `Start` asks of a `subprocess.Popen`."""

    returncode: int | None = None

    def __init__(self, command: Sequence[str], output: Path, environment: dict[str, str]) -> None:
        guard()  # a process, which has to be there before a fork
        load()
        self.pid = os.fork()
        if not self.pid:
            _run(command, output, environment)

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Kill it, and wait for its end: its session may not have been there to be killed."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def can_fork() -> bool:
    """Whether this process can be forked: on Linux, with one thread, and a torch that `load` has
    loaded. Modules of the script must not be loaded: they would keep what `child` replaces.
    """
    bare = threading.active_count() == 1 and "torch" not in sys.modules
    return bool(load.cache_info().currsize) or (bare and sys.platform == "linux")


@functools.cache
def load() -> int:
    """Load torch. Returns its number of threads; here it has one.

    A fork of a process with a pool of threads would wait for them forever.
    """
    torch = importlib.import_module("torch")
    for name in PRELOAD:
        importlib.import_module(name)
    number = int(torch.get_num_threads())
    torch.set_num_threads(1)
    return number


def _run(command: Sequence[str], output: Path, environment: dict[str, str]) -> NoReturn:
    """Be the process that a new interpreter would be."""
    try:
        os.setsid()
        _redirect(output)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # as TMPDIR says
        atexit._clear()
        atexit.register(getattr(multiprocessing.util, "_exit_function"))  # noqa: B009
        _reset_torch(int(environment.get("OMP_NUM_THREADS", load())))
        if sys.path[0] not in ("", os.getcwd()):
            sys.path.insert(0, os.getcwd())
        sys.argv = ["child", *command]
        child.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _redirect(output: Path) -> None:
    """Read nothing, and write to a file, line by line."""
    files = (os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT))
    for number, file in ((0, files[0]), (1, files[1]), (2, files[1])):
        os.dup2(file, number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115
            number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reset_torch(threads: int) -> None:
    """As in a new interpreter: threads, and seeds of its own. Python's generator needs no help."""
    torch = sys.modules["torch"]
    torch.seed()
    torch.set_num_threads(threads)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
