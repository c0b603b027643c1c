"""PyTorch's own tests of DDP, those that ship inside torch, on MiniDDP: each has its name here.

All of them take two to three minutes on two cores; `make test` runs a sample on two ranks. One
alone, with what it printed: ``python -m tests.torch_suite -v -k test_ddp_namedtuple``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = json.loads(Path(__file__).with_name("table.json").read_text())
COMMAND = [sys.executable, "-m", "tests.torch_suite", "--world-size", str(TABLE["world_size"])]
COMMAND += ["--timeout", "600"]  # seconds per test, on a busy machine
# What torch's DDP does and MiniDDP does not, with the error by which it says so: a test hands the
# wrapper's logger on to torch's C++.
DECLINED = TABLE["declined"]


def run(folder: Path, *options: str) -> dict[str, dict]:
    """The results of a run of the harness, by name."""
    file = folder / "results.json"
    ended = subprocess.run(
        [*COMMAND, "--json", file, *options], cwd=ROOT, text=True, capture_output=True, timeout=3600
    )
    assert file.exists(), ended.stderr
    return {result["name"]: result for result in json.loads(file.read_text())}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch_suite")


@pytest.fixture(scope="session")
def results(folder: Path) -> dict[str, dict]:
    names = str(folder / "names")
    return run(folder, "--class", "miniddp", "--runnable", "--names", names)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*TABLE["runnable"]} - {*DECLINED}), ids=str)
def test_miniddp_passes_what_torchs_ddp_passes(name: str, results: dict[str, dict]) -> None:
    result = results[name]
    assert result["outcome"] == "passed", f"{name}: {result['outcome']}\n{result['detail']}"
    assert result["constructed"] > 0, f"{name} passed without constructing the class"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "error"), DECLINED.items(), ids=str)
def test_miniddp_declines_the_rest_by_an_error(
    name: str, error: str, results: dict[str, dict]
) -> None:
    assert results[name]["outcome"] == "failed"
    assert error in results[name]["detail"]


@pytest.mark.slow
def test_every_test_that_ships_inside_torch_is_classified(
    folder: Path, results: dict[str, dict]
) -> None:
    listed = (folder / "names").read_text().split()
    classified = {*TABLE["runnable"], *TABLE["not_runnable"]}
    assert set(results) < set(listed) == classified, (
        "name the new ones in table.json: --class torch says which of them can run"
    )


SAMPLE = ("DataParallelCPU", "no_sync", "control_flow_d", "ignore_params_arg")
SAMPLE += ("namedtuple", "static_graph_api_cpu", "uneven_input_exception")


def test_a_sample_passes_on_two_ranks(tmp_path: Path) -> None:
    chosen = [word for name in SAMPLE for word in ("-k", name)]
    options = ("--world-size", "2", "--file", "distributed_test", "--runnable", *chosen)
    results = run(tmp_path, *options)
    assert len(results) >= len(SAMPLE)
    assert {name: r["detail"] for name, r in results.items() if r["outcome"] != "passed"} == {}
    assert all(result["constructed"] for result in results.values())
