"""What the fork server and its tracker mean for the process that started them."""

from jupyter_client import KernelManager

IN_A_KERNEL = """
import atexit
from pathlib import Path
from labkit.launch import run_ranks

atexit.register(Path("ended_by_itself").touch)
assert run_ranks(lambda rank: rank, 2) == [0, 1]
"""


def test_a_kernel_that_has_run_ranks_ends_by_itself_and_leaves_no_folder(tmp_path, monkeypatch):
    """Before it ends, a kernel waits for the processes of its group. Jupyter then kills it.

    Jupyter waits for half the time that it is given: 10 s here, of which one is needed.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    kernel = KernelManager(kernel_name="python3", transport="ipc", shutdown_wait_time=20)
    kernel.connection_file = str(tmp_path / "kernel.json")
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
    assert [path.name for path in temporary.glob("pymp-*")] == []
