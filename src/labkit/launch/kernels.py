"""Jupyter kernels that are reached through sockets in the file system instead of TCP ports.

jupyter_client asks the system for five free ports, closes them, and hands their numbers to the
kernel, which opens them a second later. On a busy machine, another process sometimes takes one
of them, and the kernel ends before its first cell. A socket in the file system has a unique name.

Inside `labkit.launch.forks.shared_server`, a kernel of this Python is a fork of a process that has
loaded torch, IPython, and matplotlib: what `python -m ipykernel_launcher` would be. It ends when
the process that manages it ends.
"""

import atexit
import contextlib
import multiprocessing.process
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

from labkit.launch.fork_server import FRESH_PATH
from labkit.launch.forks import ForkServer, NotStartedError, fresh_randomness, is_shared
from labkit.launch.popen import ForkedPopen

_LAUNCHER = "ipykernel_launcher"
# Not matplotlib.pyplot, which looks at its environment when it is loaded.
_KERNELS = ForkServer(
    *(_LAUNCHER, "ipykernel.kernelapp", "ipykernel.ipkernel"),
    *("matplotlib.backends.backend_agg", "matplotlib.figure", "torch", "labkit.launch.kernels"),
)
# A process that multiprocessing forks has another name, and a parent.
_MAIN = multiprocessing.process.current_process()
_INLINE = "module://matplotlib_inline.backend_inline"  # ipykernel's choice


def _run(options: Sequence[str]) -> None:
    """Be a kernel with these command-line options until it is shut down."""
    import ipykernel_launcher  # these are loaded in the server
    import matplotlib
    import torch
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.kernelapp import IPKernelApp

    multiprocessing.process._parent_process = None
    multiprocessing.process._current_process = _MAIN
    given = os.environ.get("PYTHONPATH", "")
    first = [os.path.abspath(path) for path in given.split(os.pathsep)] if given else []
    sys.path[:] = dict.fromkeys([*first, *FRESH_PATH])
    fresh_randomness()
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():  # torch has read it before
        torch.set_num_threads(int(threads))
    matplotlib.rcParams["backend"] = os.environ.setdefault("MPLBACKEND", _INLINE)
    # Nobody debugs here, and its import is a third of the time in which a kernel starts.
    sys.modules["debugpy"] = None
    sys.argv = [ipykernel_launcher.__file__, *options]
    try:
        IPKernelApp.launch_instance(kernel_class=IPythonKernel, parent_handle=os.getppid())
    finally:
        atexit._run_exitfuncs()


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
