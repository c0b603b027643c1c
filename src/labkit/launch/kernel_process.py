"""A kernel that is a fork: what `python -m ipykernel_launcher` would be, already loaded.

matplotlib.pyplot is not loaded: it looks at its environment when it is.
"""

import atexit
import multiprocessing.process
import os
import sys
from collections.abc import Sequence

import ipykernel_launcher
import matplotlib
import matplotlib.backends.backend_agg
import matplotlib.figure
import torch
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

from labkit.launch.fork_server import FRESH_PATH
from labkit.launch.forks import fresh_randomness

# A process that multiprocessing forks has another name, and a parent.
_MAIN = multiprocessing.process.current_process()
_INLINE = "module://matplotlib_inline.backend_inline"  # ipykernel's choice


def run(options: Sequence[str]) -> None:
    """Be a kernel with these command-line options until it is shut down."""
    multiprocessing.process._parent_process = None
    multiprocessing.process._current_process = _MAIN
    given = os.environ.get("PYTHONPATH", "")
    first = [os.path.abspath(path) for path in given.split(os.pathsep)] if given else []
    sys.path[:] = dict.fromkeys([*first, *FRESH_PATH])
    fresh_randomness()
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():  # torch has read it before
        torch.set_num_threads(int(threads))
    matplotlib.rcParams["backend"] = os.environ.setdefault("MPLBACKEND", _INLINE)
    sys.argv = [ipykernel_launcher.__file__, *options]
    try:
        IPKernelApp.launch_instance(kernel_class=IPythonKernel, parent_handle=os.getppid())
    finally:
        atexit._run_exitfuncs()
