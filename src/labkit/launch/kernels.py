"""Jupyter kernels that are reached through sockets in the file system instead of TCP ports.

jupyter_client asks the system for five free ports, closes them, and hands their numbers to the
kernel, which opens them a second later. On a busy machine, another process sometimes takes one
of them, and the kernel ends before its first cell. A socket in the file system has a unique name.

Inside `labkit.launch.forks.shared_server`, a kernel of this Python is a fork of a process that has
loaded torch, IPython, and matplotlib (`labkit.launch.kernel_process`). It ends when the process
that manages it ends.
"""

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from jupyter_client import AsyncKernelManager, KernelManager
from jupyter_client.provisioning import LocalProvisioner
from jupyter_core.paths import jupyter_runtime_dir
from traitlets import HasTraits, default

from labkit.launch.forks import ForkServer, NotStartedError, is_shared, start_forked

_KERNELS = ForkServer("labkit.launch.kernel_process")
_LAUNCHER = "ipykernel_launcher"
_LOOK_EVERY = 0.5  # seconds


class ForkedKernel:
    """What jupyter_client asks of a kernel's `subprocess.Popen`, for one that was forked."""

    stdin = stdout = stderr = None  # it inherits them

    def __init__(self, options: Sequence[str], **place: Any) -> None:
        """Start a kernel with command-line `options`; `place`: of `start_forked`.

        Raises NotStartedError, EOFError, or OSError.
        """
        self.returncode: int | None = None
        with contextlib.ExitStack() as fork:
            self._connection = fork.enter_context(_KERNELS.forked(_supervise, options, place))
            self.pid = self._connection.recv()
            self._fork = fork.pop_all()

    def poll(self) -> int | None:
        """The kernel's exit code, negative for a signal; None while it runs."""
        if self.returncode is None and self._connection.poll():
            try:
                self.returncode = self._connection.recv()
            except (EOFError, OSError):
                self.returncode = -signal.SIGKILL
            self._fork.close()
        return self.returncode

    wait = poll  # asked of a kernel that has ended

    def send_signal(self, number: int) -> None:
        """Send a signal to the kernel and the processes of its group."""
        if self.poll() is None:
            with contextlib.suppress(OSError):
                self._connection.send(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _supervise(caller: Connection, options: Sequence[str], place: dict[str, Any]) -> None:
    from labkit.launch.kernel_process import run

    kernel = start_forked(run, options, **place)
    caller.send(kernel.pid)
    while kernel.exitcode is None:
        # A child of the kernel may hold its sentinel open, so look from time to time, too.
        if caller in wait([caller, kernel.sentinel], timeout=_LOOK_EVERY):
            number = caller.recv()
            if kernel.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(kernel.pid, number)
    caller.send(kernel.exitcode)


class _Kernel(HasTraits):
    """Other defaults for two of jupyter_client's public settings, and another way to start."""

    @default("connection_file")
    def _a_name_of_its_own(self) -> str:
        folder = jupyter_runtime_dir()
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return os.path.join(folder, f"kernel-{uuid.uuid4()}.json")

    @default("transport")
    def _files_where_they_work(self) -> str:
        # macOS allows a socket's path 103 bytes, Linux 107; jupyter_client appends "-ipc-5".
        return "ipc" if len(os.fsencode(self.connection_file)) <= 99 else "tcp"

    async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
        # jupyter_client calls it in both managers, and offers it to be overridden.
        provisioner = self.provisioner
        python, *words = kernel_cmd
        outputs = [options.get(name) for name in ("stdout", "stderr")]
        if (
            is_shared()
            and type(provisioner) is LocalProvisioner
            and (python, *words[:2]) == (sys.executable, "-m", _LAUNCHER)
            and all(hasattr(file, "name") for file in outputs if file is not None)
        ):
            stdout, stderr = (file and Path(file.name) for file in outputs)
            place = {"folder": options.get("cwd"), "environment": dict(options["env"])}
            with contextlib.suppress(NotStartedError, EOFError, OSError):
                process = ForkedKernel(words[2:], stdout=stdout, stderr=stderr, **place)
                provisioner.process, provisioner.pid = process, process.pid
                return
        await super()._async_launch_kernel(kernel_cmd, **options)


class KernelThroughFiles(_Kernel, KernelManager):
    """jupyter_client's manager of one kernel; ports are used only where such sockets do not work.

    nbval has no option for it: `pytest -p labkit.launch.kernels` makes it nbval's own.
    """


class AsyncKernelThroughFiles(_Kernel, AsyncKernelManager):
    """The same for nbclient: `NotebookClient(…, kernel_manager_class=AsyncKernelThroughFiles)`."""


def pytest_configure() -> None:
    """Let nbval reach its kernels through files."""
    import nbval.kernel

    nbval.kernel.KernelManager = KernelThroughFiles
