"""PyTorch's own tests of DDP on GPUs: MiniDDP has to pass each one that torch's DDP passes.

With one GPU all ranks share it, over gloo (`tests.torch_suite`, ``--device gpu``). With two or more
nothing is replaced but the class: the tests choose NCCL and each rank's GPU themselves.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root

from .machine import Machine
from .proofs import CannotProveError, Evidence

TIMEOUT = 3600.0
REHEARSED = ("test_ddp_namedtuple", "test_ddp_grad_div_uneven_inputs")
# It hands the wrapper's logger on to torch's C++, which takes no other.
DECLINED = ("test_compute_bucket_assignment_by_size_sparse_error_with_logger",)


def results(cls: str, options: list[str]) -> dict[str, dict[str, Any]]:
    """By name, how each test ended with this class. Raises RuntimeError if none was run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", "tests.torch_suite", "--class", cls, "--json", str(file)]
        done = run_guarded([*command, *options], TIMEOUT, cwd=project_root(), env={**os.environ})
        if not file.exists():
            raise RuntimeError(f"PyTorch's tests did not run: {done.stderr.strip()[-300:]}")
        return {result["name"]: result for result in json.loads(file.read_text())}


def compared(what: str, on: str, options: list[str]) -> Evidence:
    """Both classes through the same tests."""
    torchs, ours = (results(cls, options) for cls in ("torch", "miniddp"))
    passed = {
        name for name, one in torchs.items() if one["outcome"] == "passed" and one["constructed"]
    }
    lost = {
        name for name in passed if ours[name]["outcome"] != "passed" and not name.endswith(DECLINED)
    }
    for name in sorted(lost):
        print(f"{name}: {ours[name]['outcome']}\n{ours[name]['detail'][-2000:]}", flush=True)
    names = ", ".join(sorted(name.rpartition(".")[2] for name in lost))
    said = f"{len(passed) - len(lost)} of {len(passed)} that torch's DDP passes"
    said += f" (of {len(torchs)} tests)" + (f"; not: {names}" if lost else "")
    return Evidence(what, on, bool(passed) and not lost, said)


def find(machine: Machine) -> Iterator[Evidence]:
    what = "PyTorch's tests of DDP"
    if machine.kind == "cpu":
        options = [word for name in REHEARSED for word in ("-k", name)]
        yield compared(what, "4 ranks, CPU, gloo", options)
        return
    options = ["--device", "gpu", "--world-size", "2", "--jobs", "4", "--timeout", "180"]
    yield compared(what, "2 ranks on one GPU, gloo", options)


def find_nccl(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError("NCCL is for GPUs")
    ranks = len(machine.gpus)
    options = ["--device", "gpus", "--world-size", str(ranks), "--jobs", "1", "--timeout", "300"]
    yield compared("PyTorch's tests of DDP", f"{ranks} ranks, {ranks} GPUs, NCCL", options)
