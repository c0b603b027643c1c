"""Kernels that are reached through files: no port is drawn, and none can be taken."""

import tempfile
from pathlib import Path

import nbval.kernel
import pytest
from jupyter_client.connect import LocalPortCache

from labkit.launch.kernels import AsyncKernelThroughFiles, KernelThroughFiles


@pytest.fixture
def every_port_is_taken(monkeypatch):
    def taken(self, address):
        raise AssertionError("a port was drawn, which somebody else can take before it is used")

    monkeypatch.setattr(LocalPortCache, "find_available_port", taken)


def test_two_kernels_of_nbval_in_one_folder_need_no_port(
    every_port_is_taken, monkeypatch, tmp_path
):
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


def test_a_path_too_long_for_a_socket_leaves_the_ports(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "long" / ("x" * 100)))
    assert KernelThroughFiles(kernel_name="python3").transport == "tcp"
    assert AsyncKernelThroughFiles(kernel_name="python3").transport == "tcp"
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", short)
        assert KernelThroughFiles(kernel_name="python3").transport == "ipc"
        assert AsyncKernelThroughFiles(kernel_name="python3").transport == "ipc"
