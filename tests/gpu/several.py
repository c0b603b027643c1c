"""What needs two GPUs: torch's DataParallel, the race, overlap by the profiler, the chapters."""

import copy
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from labkit.launch.guard import run_guarded
from labkit.launch.scripts import project_root
from miniddp import MiniDDP
from miniddp.training import MiniDataParallel
from tests.ddp_models import loss_of

from .machine import Group, Machine, deterministic
from .proofs import CannotProveError, Evidence
from .training import batches, distance, gradients, model

Span = tuple[float, float]
WIDE, ROWS = 4096, 8192
NEEDS_TWO = "a CPU is one device: it has no second one, no link and no kernels to profile"


def _refuse_a_rehearsal(machine: Machine) -> None:
    if machine.kind == "cpu":
        raise CannotProveError(NEEDS_TWO)


def both_data_parallels(devices: list[str]) -> dict[str, tuple[float, float, bool]]:
    """By model: distances of MiniDataParallel and of torch's DataParallel to one device; equal?"""
    first = torch.device(devices[0])
    deterministic(first)
    found = {}
    for name in ("mlp", "convolution", "dense embedding"):
        batch = next(batches(name, 0, 0, 1)).to(first)
        alone = model(name, first)
        loss_of(alone(batch)).backward()
        both = []
        for wrap in (MiniDataParallel, nn.DataParallel):
            module = copy.deepcopy(model(name, first))
            loss_of(wrap(module, devices)(batch)).backward()
            both.append(gradients(module))
        ours, theirs = both
        wanted = gradients(alone)
        found[name] = (
            distance(ours, wanted).relative,
            distance(theirs, wanted).relative,
            distance(ours, theirs).bitwise,
        )
    return found


def find_data_parallel(machine: Machine) -> Iterator[Evidence]:
    _refuse_a_rehearsal(machine)
    group = Group("1 process, 2 GPUs", 1, "cuda", exact=False)
    [found] = group.run(both_data_parallels, ["cuda:0", "cuda:1"])
    same = [name for name, (_, _, bitwise) in found.items() if bitwise]
    right = all(ours < 1e-5 and theirs < 1e-5 for ours, theirs, _ in found.values())
    said = f"{len(same)} of {len(found)} models bitwise torch's DataParallel"
    yield Evidence("MiniDataParallel", group.label, right and len(same) == len(found), said)


def hidden_share(communication: Iterable[Span], computation: Iterable[Span]) -> float:
    """The part of the communication's time in which something is computed, from 0 to 1."""
    busy = _united(computation)
    sent = _united(communication)
    total = sum(end - begin for begin, end in sent)
    both = sum(
        max(0.0, min(end, until) - max(begin, since))
        for begin, end in sent
        for since, until in busy
    )
    return both / total if total else 0.0


def _united(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not overlap, in order."""
    united: list[Span] = []
    for begin, end in sorted(spans):
        if united and begin <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((begin, end))
    return united


def profiled(rank: int, device: torch.device, wrapper: str) -> tuple[int, float]:
    """On each rank: NCCL's kernels in one step, and the part of their time behind others."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(8)]).to(device)
    wrapped = {"MiniDDP": MiniDDP, "torch DDP": DistributedDataParallel}[wrapper](module)
    x = torch.randn(ROWS, WIDE, device=device)
    for _ in range(3):
        wrapped(x).square().mean().backward()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        wrapped(x).square().mean().backward()
        torch.cuda.synchronize(device)
    nccl: list[Span] = []
    others: list[Span] = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            lane = nccl if "nccl" in event.name.lower() else others
            lane.append((event.time_range.start, event.time_range.end))
    return len(nccl), hidden_share(nccl, others)


def find_overlap(machine: Machine) -> Iterator[Evidence]:
    _refuse_a_rehearsal(machine)
    for group in machine.groups():
        if group.ranks > 1:
            for wrapper in ("MiniDDP", "torch DDP"):
                of_ranks = group.run(profiled, wrapper)
                kernels = min(count for count, _ in of_ranks)
                least = min(share for _, share in of_ranks)
                said = f"{kernels} NCCL kernels, {least:.0%} of their time behind computation"
                yield Evidence(f"overlap, {wrapper}", group.label, kernels > 0 and least > 0, said)


def find_race(machine: Machine) -> Iterator[Evidence]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "race.json"
        ranks = max(2, len(machine.gpus))
        command = [sys.executable, "labs/benchmarks/step_time.py", "--device", machine.kind]
        command += ["--ranks", str(ranks), "--link", "loopback", "--json", str(file)]
        if machine.kind == "cpu":
            command += ["--quick", "--model", "wide MLP"]
        done = run_guarded(command, 1800, cwd=project_root(), env={**os.environ})
        print(done.stdout, flush=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        cells = json.loads(file.read_text())["cells"]
    for name, cell in cells.items():
        ours, theirs = (sorted(cell["seconds"][one]) for one in ("MiniDDP", "torch DDP"))
        ratio = ours[len(ours) // 2] / theirs[len(theirs) // 2]
        said = f"MiniDDP ÷ torch DDP: {ratio:.2f} (measured, not judged)"
        yield Evidence(f"race: {name}", f"{ranks} ranks", True, said)


def find_chapters(machine: Machine) -> Iterator[Evidence]:
    _refuse_a_rehearsal(machine)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "labkit.book.chapters", "execute", "book", folder]
        done = run_guarded(command, 3600, cwd=project_root(), env={**os.environ})
    said = (done.stdout + done.stderr).strip().splitlines()[-1:]
    on = f"up to {len(machine.gpus)} ranks on their own GPUs, others on the CPU"
    yield Evidence("every chapter runs", on, done.returncode == 0, " ".join(said)[:120])
