"""What the fork server and its tracker mean for the process that started them."""

import subprocess
import sys
import tempfile
from pathlib import Path

from labkit.launch.kernels import KernelThroughFiles

IN_A_KERNEL = """
import atexit, os
from pathlib import Path
from labkit.launch import run_ranks

atexit.register(Path("ended_by_itself").touch)
assert run_ranks(lambda rank: rank, 2) == [0, 1]
assert list(Path(os.environ["TMPDIR"]).glob("pymp-*"))  # the folder of the server's socket
"""
# Seconds. Jupyter sends SIGTERM after half of them; the kernel needs about one. Keep it below 28:
# after 14 s ipykernel kills its children, and the test would pass without the fix.
PATIENCE = 20


def test_a_kernel_that_has_run_ranks_ends_by_itself_and_leaves_no_folder(tmp_path, monkeypatch):
    # A short path: that of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        kernel = KernelThroughFiles(kernel_name="python3", shutdown_wait_time=PATIENCE)
        kernel.start_kernel(cwd=str(tmp_path))
        client = kernel.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            reply = client.execute_interactive(IN_A_KERNEL, timeout=60)
        finally:
            client.stop_channels()
            kernel.shutdown_kernel()
        assert reply["content"]["status"] == "ok", reply
        assert (tmp_path / "ended_by_itself").exists()
        assert [path.name for path in Path(temporary).glob("pymp-*")] == []


IS_THE_TRACKER_A_CHILD = """
import warnings
warnings.simplefilter("error")
from multiprocessing.resource_tracker import _resource_tracker
from labkit.launch import run_ranks

assert run_ranks(lambda rank: rank, 2) == [0, 1]
print("a child:", _resource_tracker._pid is not None)
"""


def test_a_caller_without_a_standard_input_has_a_tracker_that_is_no_child():
    command = ["sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, IS_THE_TRACKER_A_CHILD]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "a child: False\n", ended.stderr
    assert ended.stderr == ""


def test_where_the_tracker_cannot_be_started_away_from_the_caller_python_starts_its_own(tmp_path):
    """Their executable rejects -S, as a program that embeds Python may."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\n[ "$2" = -S ] && exit 1\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    script = f"import multiprocessing; multiprocessing.set_executable({str(program)!r})\n"
    script += IS_THE_TRACKER_A_CHILD
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "a child: True\n", ended.stderr
