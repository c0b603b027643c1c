"""What is proved by commands of their own: labs, the doctor, PyTorch's tests, chapters."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root

from .machine import ENVIRONMENT, CannotProveError, Evidence, Machine

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
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
REHEARSED = ("test_ddp_namedtuple", "test_ddp_grad_div_uneven_inputs")
# It hands the wrapper's logger on to torch's C++, which takes no other.
DECLINED = "test_compute_bucket_assignment_by_size_sparse_error_with_logger"


def python(machine: Machine, *words: str) -> CompletedProcess[str]:
    """Run this Python with `words` from the project's root, and leave no process behind."""
    own = {"OMP_NUM_THREADS": "1", "LABKIT_DEVICE": machine.kind}
    environment = {**os.environ, **ENVIRONMENT, **own}
    command = [sys.executable, *words]
    return run_guarded(command, machine.deadline.left(3600.0), cwd=project_root(), env=environment)


def find_labs(machine: Machine) -> Iterator[Evidence]:
    for lab, arguments, ranks in LABS if machine.kind == "cuda" else LABS[3:4]:
        what = " ".join((f"labs/{lab}.py", *arguments))
        # Forked ranks would share a process that has asked for GPUs; these start alone.
        done = python(machine, *TORCHRUN, f"--nproc-per-node={ranks}", *what.split())
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
        said = f"exit code {done.returncode}: its own verdict"
        yield Evidence(what, machine.group(ranks).label, done.returncode == 0, said)


def find_doctor(machine: Machine) -> Iterator[Evidence]:
    """The lab prints a hash of its weights after twelve steps: they have the same bits."""
    lab = "labs/when_a_node_fails.py"
    torchrun = (*TORCHRUN, "--nproc-per-node=2")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        options = ("--folder", folder, "--json", str(file), "--quiet", "--fail-on", "error")
        doctor = ("-m", "ddp_doctor", *options)
        alone, watched = (python(machine, *torchrun, *before, lab) for before in ((), doctor))
        report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    hashes = [
        [line for line in done.stdout.splitlines() if line.startswith("weights ")]
        for done in (alone, watched)
    ]
    same = hashes[0] == hashes[1] != []
    said = f"exit code {watched.returncode}; the weights unchanged: {same}; report: {bool(report)}"
    holds = watched.returncode == 0 and same and bool(report)
    if not holds:
        print(alone.stderr[-2000:], watched.stdout[-2000:], watched.stderr[-2000:], sep="\n")
    yield Evidence("the doctor watches a lab", machine.pair().label, holds, said)


CERTIFIED = {"mean": ("equal", 0), "divided twice": ("scaled", 3)}
"""By the loss of `a_run_on_gpus.py`: the verdict and its exit code."""


def find_certificate(machine: Machine) -> Iterator[Evidence]:
    """A script that puts its model on `cuda`, without --cpu: a right one, and a known mistake."""
    script = str(Path(__file__).with_name("a_run_on_gpus.py").relative_to(project_root()))
    for loss, (verdict, code) in CERTIFIED.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.json"
            options = ("--certify", "--ranks", "2", "--fail-on", "error")
            options += ("--folder", folder, "--json", str(file))
            done = python(machine, "-m", "ddp_doctor", *options, script, loss)
            report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        certificate = report.get("certificate") or {}
        found, ratio = certificate.get("verdict"), certificate.get("ratio") or float("nan")
        if (holds := (found, done.returncode) == (verdict, code)) is False:
            print(done.stdout[-3000:], done.stderr[-2000:], sep="\n")
        said = f"{found}, ratio {ratio:.4f}, exit code {done.returncode}"
        yield Evidence(f"loss: {loss}", "2 ranks, one process", holds, said)


def pytorch_results(machine: Machine, cls: str, options: list[str]) -> dict[str, dict[str, Any]]:
    """By name, how each test ended with this class. Raises RuntimeError if none was run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = ("-m", "tests.torch_suite", "--class", cls, "--json", str(file), *options)
        done = python(machine, *command)
        if not file.exists():
            raise RuntimeError(f"PyTorch's tests did not run: {done.stderr.strip()[-300:]}")
        return {result["name"]: result for result in json.loads(file.read_text())}


def compared(machine: Machine, on: str, options: list[str]) -> Evidence:
    """PyTorch's tests with both classes: ours has to pass each one that torch's passes."""
    torchs, ours = (pytorch_results(machine, cls, options) for cls in ("torch", "miniddp"))
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
        yield compared(
            machine, "4 ranks, CPU, gloo", [w for name in REHEARSED for w in ("-k", name)]
        )
        return
    options = ["--device", "gpu", "--world-size", "2", "--jobs", "4", "--timeout", "180"]
    yield compared(machine, "2 ranks on one GPU, gloo", options)


def find_nccl(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError("NCCL is for GPUs")
    ranks = len(machine.gpus)
    options = ["--device", "gpus", "--world-size", str(ranks), "--jobs", "1", "--timeout", "300"]
    yield compared(machine, f"{ranks} ranks, {ranks} GPUs, NCCL", options)


def find_chapters(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError("make book runs the chapters on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        done = python(machine, "-m", "labkit.book.chapters", "execute", "book", folder)
    said = (done.stdout + done.stderr).strip().splitlines()[-1:]
    on = f"up to {len(machine.gpus)} ranks on their own GPUs, others on the CPU"
    yield Evidence("every chapter runs", on, done.returncode == 0, " ".join(said)[:120])
