"""Kernels that are reached through files, and kernels that are forks: what differs is the start."""

import contextlib
import json
from pathlib import Path
from typing import Any

import nbval.kernel
from jupyter_client import BlockingKernelClient
from jupyter_client.connect import LocalPortCache
from processes import becomes

from labkit.launch.forks import SHARED
from labkit.launch.kernels import KernelThroughFiles
from labkit.launch.popen import ForkedPopen


def test_two_kernels_of_nbval_in_one_folder_need_no_port(monkeypatch, tmp_path):
    def taken(self, address):
        raise AssertionError("a port was drawn, which somebody else can take before it is used")

    monkeypatch.setattr(LocalPortCache, "find_available_port", taken)
    monkeypatch.setattr(nbval.kernel, "KernelManager", KernelThroughFiles)
    kernels = [nbval.kernel.RunningKernel("python3", cwd=str(tmp_path)) for _ in range(2)]
    places = [Path(kernel.kc.connection_file) for kernel in kernels]
    try:
        for number, kernel in enumerate(kernels):
            kernel.kc.execute_interactive(f"open('{number}', 'w').close()", timeout=300)
    finally:
        for kernel in kernels:
            kernel.stop()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    for place in places:
        assert list(place.parent.glob(f"{place.stem}*")) == []


class Running:
    """A kernel that has started, and its client."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelThroughFiles(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)

    def value(self, expression: str) -> Any:
        """What an expression is in the kernel, by way of JSON."""
        code = {"it": f"__import__('json').dumps({expression})"}
        reply = self.client.execute_interactive("", user_expressions=code, timeout=300)
        found = reply["content"]["user_expressions"]["it"]
        assert found["status"] == "ok", found
        return json.loads(eval(found["data"]["text/plain"]))

    def ends(self) -> int:
        """Wait for its end; the exit code."""
        process = self.manager.provisioner.process
        assert becomes(lambda: process.poll() is not None)
        assert not self.manager.is_alive()
        return process.returncode

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


STATE = """dict(
    main=__name__ == "__main__" and vars(__import__("sys").modules["__main__"]) is globals(),
    folder=__import__("os").getcwd(),
    words=[__import__("os").path.basename(__import__("sys").argv[0]), *__import__("sys").argv[1:2]],
    path=__import__("sys").path,
    process=__import__("multiprocessing").current_process().name,
    parent=str(__import__("multiprocessing").parent_process()),
    threads=__import__("torch").get_num_threads(),
    backend=__import__("matplotlib").get_backend(),
    pyplot="matplotlib.pyplot" in __import__("sys").modules,
    shown=[str(one[2]) for one in __import__("warnings").filters if one[:2] == ("default", None)],
    variable=__import__("os").environ["GIVEN"],
)"""


def test_a_forked_kernel_has_the_state_of_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setenv("GIVEN", "this")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    states = []
    for shared in (True, False):
        if not shared:
            monkeypatch.delenv(SHARED)  # a new interpreter
        with contextlib.closing(Running(tmp_path)) as kernel:
            assert isinstance(kernel.manager.provisioner.process, ForkedPopen) == shared
            states.append(kernel.value(STATE))
    assert states[0] == states[1]
    assert states[0]["main"]
    assert states[0]["folder"] == str(tmp_path)


def test_a_forked_kernel_can_be_interrupted_goes_on_and_runs_what_is_registered_for_its_exit(
    tmp_path,
):
    with contextlib.closing(Running(tmp_path)) as kernel:
        assert isinstance(kernel.manager.provisioner.process, ForkedPopen)
        message = kernel.client.execute(
            "import pathlib, time; pathlib.Path('began').touch(); time.sleep(300)"
        )
        assert becomes((tmp_path / "began").exists)
        kernel.manager.interrupt_kernel()
        reply = kernel.client._recv_reply(message, timeout=60)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert kernel.value("1 + 1") == 2
        code = "import atexit, pathlib; atexit.register(pathlib.Path('ended').touch)"
        kernel.client.execute_interactive(code, timeout=300)
        kernel.client.shutdown()
        assert kernel.ends() == 0
    assert (tmp_path / "ended").exists()
