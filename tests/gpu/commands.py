"""What is proved by commands of their own: labs, the doctor, PyTorch's tests, chapters.

And what the book emulates: the draws of a GPU's generator.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root
from labkit.scenarios.unwrapped_loss import MOST_ELEMENTS, randn

from . import ENVIRONMENT, CannotProveError, Evidence, Machine

LABS = {
    "labs/bypassed_wrapper.py": 2,
    "labs/accumulate_vs_ddp.py": 4,
    "labs/mean_of_means.py": 2,
    "labs/sum_or_average.py": 2,
    "labs/bypassed_wrapper.py --fix prepared": 2,
    "labs/two_nodes.py": 2,
    "labs/buckets_that_overlap.py": 2,
}
"""Each with its ranks. Their exit codes are their own verdicts; the first one is rehearsed."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
WRITTEN_FOR_GPUS = "tests/gpu/written_for_gpus.py"
CERTIFIED = {"mean": ("equal", 0), "divided twice": ("scaled", 3)}
"""By the loss of WRITTEN_FOR_GPUS: the verdict and its exit code."""
REHEARSED = ("-k", "test_ddp_namedtuple", "-k", "test_ddp_grad_div_uneven_inputs")


def python(machine: Machine, *words: str) -> CompletedProcess[str]:
    """Run this Python with `words` from the project's root, and leave no process behind."""
    own = {"OMP_NUM_THREADS": "1", "LABKIT_DEVICE": machine.kind}
    environment = {**os.environ, **ENVIRONMENT, **own}
    command = [sys.executable, *words]
    return run_guarded(command, machine.left(3600.0), cwd=project_root(), env=environment)


def with_json(machine: Machine, *words: str) -> tuple[CompletedProcess[str], Any]:
    """Run a command that writes {folder}/report.json, and read that; {} if it is not there."""
    with tempfile.TemporaryDirectory() as folder:
        done = python(machine, *(word.format(folder=folder) for word in words))
        file = Path(folder) / "report.json"
        return done, json.loads(file.read_text()) if file.exists() else {}


def shown(holds: bool, *commands: CompletedProcess[str]) -> bool:
    """`holds`; if it does not, what the commands said is printed."""
    for done in () if holds else commands:
        print(done.stdout[-3000:], done.stderr[-2000:], sep="\n")
    return holds


def find_labs(machine: Machine) -> Iterator[Evidence]:
    for lab, ranks in list(LABS.items())[: 1 if machine.kind == "cpu" else None]:
        # Forked ranks would share a process that has asked for GPUs; these start alone.
        done = python(machine, *TORCHRUN, f"--nproc-per-node={ranks}", *lab.split())
        said = f"exit code {done.returncode}: its own verdict"
        holds = shown(done.returncode == 0, done)
        yield Evidence(lab, machine.on(ranks), holds, said)


DOCTOR = ("-m", "ddp_doctor", "--folder", "{folder}", "--json", "{folder}/report.json")


def find_doctor(machine: Machine) -> Iterator[Evidence]:
    """The lab prints a hash of its weights after twelve steps: they have the same bits."""
    torchrun, lab = (*TORCHRUN, "--nproc-per-node=2"), "labs/when_a_node_fails.py"
    alone = python(machine, *torchrun, lab)
    doctor = (*DOCTOR, "--quiet", "--fail-on", "error")
    watched, report = with_json(machine, *torchrun, *doctor, lab)
    hashes = [
        [line for line in done.stdout.splitlines() if line.startswith("weights ")]
        for done in (alone, watched)
    ]
    same = hashes[0] == hashes[1] != []
    said = f"exit code {watched.returncode}; the weights unchanged: {same}; report: {bool(report)}"
    holds = shown(watched.returncode == 0 and same and bool(report), alone, watched)
    yield Evidence("the doctor watches a lab", machine.on(2), holds, said)


def find_certificate(machine: Machine) -> Iterator[Evidence]:
    """A script that puts its model on `cuda`, without --cpu: a right one, and a known mistake."""
    for loss, expected in CERTIFIED.items():
        options = ("--certify", "--ranks", "2", "--fail-on", "error")
        done, report = with_json(machine, *DOCTOR, *options, WRITTEN_FOR_GPUS, loss)
        found = report.get("certificate") or {}
        ratio = found.get("ratio") or float("nan")
        holds = shown((found.get("verdict"), done.returncode) == expected, done)
        said = f"{found.get('verdict')}, ratio {ratio:.4f}, exit code {done.returncode}"
        yield Evidence(f"loss: {loss}", "2 ranks, one process", holds, said)


def beside_torchs_class(machine: Machine, on: str, *options: str) -> Evidence:
    """PyTorch's tests with both classes: ours has to pass each one that torch's passes."""
    of_class: list[dict[str, dict[str, Any]]] = []
    for cls in ("torch", "miniddp"):
        command = ("-m", "tests.torch_suite", "--class", cls, "--json", "{folder}/report.json")
        done, results = with_json(machine, *command, *options)
        if not results:
            raise RuntimeError(f"PyTorch's tests did not run: {done.stderr.strip()[-300:]}")
        of_class.append({result["name"]: result for result in results})
    torchs, ours = of_class
    table = project_root() / "tests" / "torch_suite" / "table.json"
    declined = json.loads(table.read_text())["declined"]
    passed = [n for n, one in torchs.items() if one["outcome"] == "passed" and one["constructed"]]
    lost = [n for n in passed if ours[n]["outcome"] != "passed" and n not in declined]
    for name in lost:
        print(f"{name}: {ours[name]['outcome']}\n{ours[name]['detail'][-2000:]}", flush=True)
    names = ", ".join(sorted(name.rpartition(".")[2] for name in lost))
    said = f"{len(passed) - len(lost)} of {len(passed)} that torch's DDP passes"
    said += f" (of {len(torchs)} tests)" + (f"; not: {names}" if lost else "")
    return Evidence("PyTorch's tests of DDP", on, bool(passed) and not lost, said)


def find_pytorch(machine: Machine, nccl: bool) -> Iterator[Evidence]:
    ranks, on, options = 2, "2 ranks on one GPU, gloo", ("--device", "gpu", "--jobs", "4")
    if nccl:
        ranks = len(machine.gpus)
        on, options = machine.on(ranks), ("--device", "gpus", "--jobs", "1")
    if machine.kind == "cuda":
        options += ("--world-size", str(ranks), "--timeout", "300")
        yield beside_torchs_class(machine, on, *options)
    elif nccl:
        raise CannotProveError("NCCL is for GPUs")
    else:
        yield beside_torchs_class(machine, "4 ranks, CPU, gloo", *REHEARSED)


def find_chapters(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError("make book runs the chapters on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        done = python(machine, "-m", "labkit.book.chapters", "execute", "book", folder)
    said = (done.stdout + done.stderr).strip().splitlines()[-1:]
    on = f"up to {len(machine.gpus)} ranks on their own GPUs, others on the CPU"
    yield Evidence("every chapter runs", on, done.returncode == 0, " ".join(said)[:120])


# The draws of the GPU's own generator -------------------------------------------------------------


def draws_apart(device: torch.device) -> float:
    """The largest difference between the device's draws and their emulation; 0 on a CPU."""
    largest = 0.0
    for seed in (*range(5), *range(1000, 1005)) if device.type == "cuda" else ():
        for shape in ((4, 4), (MOST_ELEMENTS,)):
            generator = torch.Generator(device).manual_seed(seed)
            real = torch.randn(*shape, generator=generator, device=device).cpu()
            largest = max(largest, float((real - randn(shape, seed)).abs().max()))
    return largest


def find_draws(machine: Machine) -> Iterator[Evidence]:
    largest = machine.run(1, draws_apart)[0]
    said = f"apart by up to {largest:.0e}"
    yield Evidence("the emulation of the GPU's randn", machine.on(1), largest < 1e-5, said)
