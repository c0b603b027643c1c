"""``python -m tests.gpu``: prove what the GPUs here can prove, and print one table."""

import argparse
import datetime
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from labkit.book.on_gpus import GpuReport, Proof
from labkit.tables import table

from . import __doc__ as description
from . import commands, elsewhere, measured, sharded, streams, timelines
from .equality import find, find_replicas
from .machine import CannotProveError, Evidence, Machine, this_machine

NO_GPU = """\
There is no GPU that torch sees, so nothing about GPUs can be proved here.
Rehearse the kit on the CPU with: python -m tests.gpu --device cpu"""
HOUR = 3600.0


class Part(NamedTuple):
    """One claim, or a family of them.

    `gpus` is the least number of GPUs that it needs, and `seconds` what it may take of 8 minutes.
    `needs` are packages that are not on every machine with a GPU.
    """

    name: str
    claim: str
    gpus: int
    seconds: float
    find: Callable[[Machine], Iterator[Evidence]]
    needs: tuple[str, ...] = ()


# The most valuable first: under --minutes, the last ones may not fit.
PARTS = (
    Part("streams", "no gradient is sent before it is computed", 1, 60, streams.find),
    Part("equality", "MiniDDP trains as torch's DDP does", 1, 150, partial(find, kind="wrappers")),
    Part("precision", "half precision gives torch's", 1, 40, partial(find, kind="precision")),
    Part("sharded", "fully_shard trains as torch's FSDP2 does", 1, 90, sharded.find),
    Part("hooks", "comm hooks do what torch's do", 1, 40, partial(find, kind="hooks")),
    Part("memory", "ours holds no more memory than torch's", 1, 40, measured.find_memory),
    Part("overlap", "communication runs behind backward", 1, 60, timelines.find),
    Part("doctor", "the doctor changes nothing", 1, 60, commands.find_doctor),
    Part("certificate", "the certificate judges CUDA scripts", 1, 120, commands.find_certificate),
    Part("draws", "the emulated generator draws what a GPU draws", 1, 30, measured.find_draws),
    Part("muon", "Muon on shards gives torch's Muon", 1, 30, elsewhere.find_muon),
    Part("local", "local updates give torch's", 1, 30, elsewhere.find_local_updates),
    Part("meshes", "collectives run along one dimension", 1, 30, elsewhere.find_meshes),
    Part("batch-norm", "SyncBatchNorm sees all ranks' batch", 1, 20, elsewhere.find_batch_norm),
    Part("ladder", "the rungs of the ladder train so, too", 1, 40, partial(find, kind="rungs")),
    Part("replicas", "MiniDataParallel sums", 1, 20, partial(find_replicas, devices=1)),
    Part("labs", "the labs hold on GPUs", 1, 100, commands.find_labs),
    Part(
        *("pytorch", "PyTorch's own tests of DDP pass", 1, 240, commands.find_pytorch),
        ("expecttest",),
    ),
    Part(
        *("data-parallel", "MiniDataParallel beside torch's", 2, 20),
        partial(find_replicas, devices=2),
    ),
    Part(
        *("pytorch-nccl", "PyTorch's own tests of DDP pass over NCCL", 2, 240, commands.find_nccl),
        ("expecttest",),
    ),
    Part(
        *("chapters", "every chapter runs with its ranks on GPUs", 2, 300, commands.find_chapters),
        ("nbclient", "nbformat", "ipykernel"),
    ),
)


def prove(part: Part, machine: Machine) -> Iterator[Proof]:
    """Run a part. An exception is a failure, with its first line as the detail."""
    rehearsal = machine.kind == "cpu"
    if not rehearsal and len(machine.gpus) < part.gpus:
        missing = f"needs {part.gpus} GPUs, {len(machine.gpus)} here"
        yield Proof(part.name, part.claim, "", "not proved", missing)
        return
    if absent := [name for name in part.needs if find_spec(name) is None]:
        yield Proof(part.name, part.claim, "", "not proved", f"needs {', '.join(absent)}")
        return
    try:
        for what, on, holds, detail in part.find(machine):
            good = "rehearsed" if rehearsal else "proved"
            yield Proof(part.name, what, on, good if holds else "FAILED", detail)
    except CannotProveError as reason:
        yield Proof(part.name, part.claim, "", "not proved", str(reason))
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0][:120]
        late = isinstance(error, TimeoutError | subprocess.TimeoutExpired)
        if late and machine.deadline.over:
            detail = f"did not end in {machine.deadline.seconds:.0f} s"
            yield Proof(part.name, part.claim, "", "not proved", detail)
            return
        yield Proof(part.name, part.claim, "", "FAILED", f"{type(error).__name__}: {first}")


def prove_all(
    parts: Sequence[Part], machine: Machine, minutes: float | None, report: Callable[..., None]
) -> list[Proof]:
    """All parts within the time, and a report after each."""
    begin, proofs = time.monotonic(), list[Proof]()
    ends = begin + 60 * minutes if minutes else float("inf")
    for part in parts:
        left = ends - time.monotonic()
        if left < min(20.0, part.seconds / 2):
            late = f"did not fit into {minutes:g} minutes"
            proofs.append(Proof(part.name, part.claim, "", "not proved", late))
            continue
        machine.deadline.starts(min(part.seconds, left) if minutes else HOUR)
        for proof in prove(part, machine):
            proofs.append(proof)
            print(f"{proof.outcome:11}{proof.part}: {proof.what}", flush=True)
        report(proofs, time.monotonic() - begin)
    report(proofs, time.monotonic() - begin)
    return proofs


def write_report(
    path: Path | None, machine: Machine, proofs: Sequence[Proof], seconds: float
) -> None:
    """Keep what is known so far."""
    if path:
        GpuReport(
            rehearsal=machine.kind == "cpu",
            command=" ".join(["python -m tests.gpu", *sys.argv[1:]]),
            date=f"{datetime.date.today():%Y-%m-%d}",
            seconds=round(seconds),
            versions=machine.versions(),
            proofs=tuple(proofs),
            timelines=machine.timelines,
        ).write(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.gpu",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=["auto", "cpu"], default="auto", help="cpu: a rehearsal")
    add("-k", dest="names", action="append", default=[], help="part of a part's name; repeatable")
    add("--list", action="store_true", help="only say what there is to prove")
    add("--minutes", type=float, help="end after about so many; the parts of most value come first")
    add("--report", type=Path, help="write a report (JSON) to this file, after each part")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    parts = [p for p in PARTS if not options.names or any(name in p.name for name in options.names)]
    if not parts:
        print(f"No part is named like that. There are: {', '.join(p.name for p in PARTS)}")
        return 1
    if options.list:
        print("\n".join(f"{p.name:15}{p.gpus} GPU{'s' * (p.gpus > 1)}  {p.claim}" for p in parts))
        return 0
    machine = this_machine(options.device)
    if machine.kind == "cuda" and not machine.gpus:
        print(NO_GPU)
        return 2
    report = partial(write_report, options.report, machine)
    proofs = prove_all(parts, machine, options.minutes, report)
    print("\n" + table(["part", "what", "on", "", "found"], [list(proof) for proof in proofs]))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in machine.versions().items()))
    if machine.kind == "cpu":
        print("\nA rehearsal on the CPU: nothing in this table was proved on a GPU.")
    outcomes = {proof.outcome for proof in proofs}
    return int("FAILED" in outcomes or not outcomes & {"proved", "rehearsed"})


if __name__ == "__main__":
    sys.exit(main())
