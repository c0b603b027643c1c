"""Jupyter kernels that are reached through sockets in the file system instead of TCP ports.

jupyter_client asks the system for five free ports, closes them, and hands their numbers to the
kernel, which opens them a second later. On a busy machine, another process sometimes takes one
of them, and the kernel ends before its first cell. A socket in the file system has a unique name.
"""

import os
import uuid

from jupyter_client import AsyncKernelManager, KernelManager
from jupyter_core.paths import jupyter_runtime_dir
from traitlets import HasTraits, default


class _ThroughFiles(HasTraits):
    """Other defaults for two of jupyter_client's public settings."""

    @default("connection_file")
    def _a_name_of_its_own(self) -> str:
        folder = jupyter_runtime_dir()
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return os.path.join(folder, f"kernel-{uuid.uuid4()}.json")

    @default("transport")
    def _files_where_they_work(self) -> str:
        # macOS allows a socket's path 103 bytes, Linux 107; jupyter_client appends "-ipc-5".
        return "ipc" if len(os.fsencode(self.connection_file)) <= 99 else "tcp"


class KernelThroughFiles(_ThroughFiles, KernelManager):
    """jupyter_client's manager of one kernel; ports are used only where such sockets do not work.

    nbval has no option for it: `pytest -p labkit.launch.kernels` makes it nbval's own.
    """


class AsyncKernelThroughFiles(_ThroughFiles, AsyncKernelManager):
    """The same for nbclient: `NotebookClient(…, kernel_manager_class=AsyncKernelThroughFiles)`."""


def pytest_configure() -> None:
    """Let nbval reach its kernels through files."""
    import nbval.kernel

    nbval.kernel.KernelManager = KernelThroughFiles
