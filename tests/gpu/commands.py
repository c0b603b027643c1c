"""What is proved by commands of their own: labs, the doctor, PyTorch's tests, chapters."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import ScriptError, project_root, run_script

from .machine import CannotProveError, Evidence, Machine

LABS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("accumulate_vs_ddp", (), 4),
    ("mean_of_means", (), 2),
    ("sum_or_average", (), 2),
    ("bypassed_wrapper", (), 2),
    ("bypassed_wrapper", ("--fix", "prepared"), 2),
    ("two_nodes", (), 2),
    ("buckets_that_overlap", (), 2),
)
"""Script, arguments, ranks. Their exit codes are their own verdicts."""
REHEARSED = ("test_ddp_namedtuple", "test_ddp_grad_div_uneven_inputs")
# It hands the wrapper's logger on to torch's C++, which takes no other.
DECLINED = "test_compute_bucket_assignment_by_size_sparse_error_with_logger"


def python(*words: str, timeout: float, device: str = "") -> CompletedProcess[str]:
    """Run this Python with `words` from the project's root, and leave no process behind."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment |= {"LABKIT_DEVICE": device} if device else {}
    return run_guarded([sys.executable, *words], timeout, cwd=project_root(), env=environment)


def printed(lab: str, arguments: tuple[str, ...], ranks: int, device: str) -> str:
    """What the lab prints on that kind of device. Raises ScriptError if it finds a fault."""
    # Forked ranks would share a process that has asked for GPUs; fresh ones start on their own.
    with mock.patch.dict(os.environ, LABKIT_DEVICE=device):
        return run_script(f"labs/{lab}.py", *arguments, ranks=ranks, fresh=device == "cuda")


def find_labs(machine: Machine) -> Iterator[Evidence]:
    for lab, arguments, ranks in LABS if machine.kind == "cuda" else LABS[3:4]:
        what = " ".join((f"labs/{lab}.py", *arguments))
        own = "NCCL" if len(machine.gpus) >= ranks else "gloo, GPUs shared"
        on = f"{ranks} ranks, {own if machine.kind == 'cuda' else 'CPU, gloo'}"
        try:
            same = printed(lab, arguments, ranks, machine.kind) == printed(
                lab, arguments, ranks, "cpu"
            )
        except ScriptError as error:
            yield Evidence(what, on, False, str(error).splitlines()[-1][:120])
            continue
        text = "the same text as" if same else "other text (times, digits) than"
        yield Evidence(what, on, True, f"exit code 0, {text} on the CPU")


def find_doctor(machine: Machine) -> Iterator[Evidence]:
    """The lab prints a hash of its weights after twelve steps: they have the same bits."""
    lab = "labs/when_a_node_fails.py"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        options = ("--folder", folder, "--json", str(file), "--quiet", "--fail-on", "error")
        doctor = ("-m", "ddp_doctor", *options)
        alone, watched = (
            python(*torchrun, *before, lab, timeout=300, device=machine.kind)
            for before in ((), doctor)
        )
        report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    hashes = [
        [line for line in done.stdout.splitlines() if line.startswith("weights ")]
        for done in (alone, watched)
    ]
    same = hashes[0] == hashes[1] != []
    on = f"2 ranks, {'GPUs' if machine.kind == 'cuda' else 'CPU'}"
    said = f"exit code {watched.returncode}; the weights unchanged: {same}; report: {bool(report)}"
    holds = watched.returncode == 0 and same and bool(report)
    yield Evidence("the doctor watches a lab", on, holds, said)


def pytorch_results(cls: str, options: list[str]) -> dict[str, dict[str, Any]]:
    """By name, how each test ended with this class. Raises RuntimeError if none was run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = ("-m", "tests.torch_suite", "--class", cls, "--json", str(file), *options)
        done = python(*command, timeout=3600)
        if not file.exists():
            raise RuntimeError(f"PyTorch's tests did not run: {done.stderr.strip()[-300:]}")
        return {result["name"]: result for result in json.loads(file.read_text())}


def compared(on: str, options: list[str]) -> Evidence:
    """PyTorch's tests with both classes: ours has to pass each one that torch's passes."""
    torchs, ours = (pytorch_results(cls, options) for cls in ("torch", "miniddp"))
    passed = [n for n, one in torchs.items() if one["outcome"] == "passed" and one["constructed"]]
    lost = [n for n in passed if ours[n]["outcome"] != "passed" and not n.endswith(DECLINED)]
    for name in lost:
        print(f"{name}: {ours[name]['outcome']}\n{ours[name]['detail'][-2000:]}", flush=True)
    names = ", ".join(sorted(name.rpartition(".")[2] for name in lost))
    said = f"{len(passed) - len(lost)} of {len(passed)} that torch's DDP passes"
    said += f" (of {len(torchs)} tests)" + (f"; not: {names}" if lost else "")
    return Evidence("PyTorch's tests of DDP", on, bool(passed) and not lost, said)


def find_pytorch(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        yield compared("4 ranks, CPU, gloo", [w for name in REHEARSED for w in ("-k", name)])
        return
    options = ["--device", "gpu", "--world-size", "2", "--jobs", "4", "--timeout", "180"]
    yield compared("2 ranks on one GPU, gloo", options)


def find_nccl(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError("NCCL is for GPUs")
    ranks = len(machine.gpus)
    options = ["--device", "gpus", "--world-size", str(ranks), "--jobs", "1", "--timeout", "300"]
    yield compared(f"{ranks} ranks, {ranks} GPUs, NCCL", options)


def find_chapters(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError("make book runs the chapters on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        done = python("-m", "labkit.book.chapters", "execute", "book", folder, timeout=3600)
    said = (done.stdout + done.stderr).strip().splitlines()[-1:]
    on = f"up to {len(machine.gpus)} ranks on their own GPUs, others on the CPU"
    yield Evidence("every chapter runs", on, done.returncode == 0, " ".join(said)[:120])
