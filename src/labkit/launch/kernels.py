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
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jupyter_client import AsyncKernelManager, KernelManager
from jupyter_client.provisioning import LocalProvisioner
from jupyter_core.paths import jupyter_runtime_dir
from traitlets import HasTraits, default

from labkit.launch.forks import ForkServer, NotStartedError, is_shared
from labkit.launch.popen import ForkedPopen

_KERNELS = ForkServer("labkit.launch.kernel_process")
_LAUNCHER = "ipykernel_launcher"


def _run(options: Sequence[str]) -> None:
    from labkit.launch.kernel_process import run  # in the server, which has loaded it

    run(options)


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
                place |= {"stdout": stdout, "stderr": stderr}
                process = ForkedPopen(_KERNELS, _run, words[2:], **place)
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
