"""PyTorch's own tests of DDP, those that ship inside torch, on MiniDDP: each has its name here.

The whole run takes about two minutes on two cores. One test alone, with what it printed:
``python -m tests.torch_suite -v -k test_ddp_namedtuple``.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TABLE = json.loads(Path(__file__).with_name("table.json").read_text())
COMMAND = [sys.executable, "-m", "tests.torch_suite", "--world-size", str(TABLE["world_size"])]


def run(folder: Path, *options: str) -> dict[str, dict]:
    """The results of a run of the harness, by name."""
    file = folder / "results.json"
    ended = subprocess.run(
        [*COMMAND, "--json", file, *options], cwd=ROOT, text=True, capture_output=True, timeout=840
    )
    assert file.exists(), ended.stderr
    return {result["name"]: result for result in json.loads(file.read_text())}


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("torch_suite")
    return run(folder, "--class", "miniddp", "--runnable", "--timeout", "120")


@pytest.mark.parametrize("name", TABLE["runnable"])
def test_miniddp_passes_what_torchs_ddp_passes(name: str, results: dict[str, dict]) -> None:
    result = results[name]
    assert result["outcome"] == "passed", f"{name}: {result['outcome']}\n{result['detail']}"
    assert result["constructed"] > 0, f"{name} passed without constructing the class"


def test_every_test_that_ships_inside_torch_is_classified() -> None:
    listed = subprocess.run(
        [*COMMAND, "--list"], cwd=ROOT, text=True, capture_output=True, timeout=120, check=True
    ).stdout.split()
    classified = {*TABLE["runnable"], *TABLE["not_runnable"]}
    assert set(listed) == classified, "write the table anew: --class torch --write-table"


def test_a_wrapper_that_never_averages_is_rejected(tmp_path: Path) -> None:
    broken = run(
        tmp_path,
        "--class",
        "tests.torch_suite.broken_classes:Unsynchronized",
        "-k",
        "DataParallelCPU",
    )
    assert {result["outcome"] for result in broken.values()} == {"failed"}
    assert all("Tensor-likes are not" in result["detail"] for result in broken.values())


def test_a_test_that_hangs_is_killed_with_all_its_ranks(tmp_path: Path) -> None:
    began = time.monotonic()
    before = {process.pid for process in psutil.process_iter()}
    hanging = run(
        tmp_path,
        *("--class", "tests.torch_suite.broken_classes:Hanging"),
        *("-k", "test_DistributedDataParallelCPU_grad_is_view", "--timeout", "3"),
    )
    assert [result["outcome"] for result in hanging.values()] == ["timeout"]
    assert time.monotonic() - began < 60
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.pid not in before
        and "tests.torch_suite" in (process.info["cmdline"] or [])
        and str(tmp_path / "results.json") in process.info["cmdline"]
    ]
    assert left == []
