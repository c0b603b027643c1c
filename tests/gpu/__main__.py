"""``python -m tests.gpu``: prove what the GPUs here can prove, and print one table."""

import argparse
import datetime
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from labkit.tables import table

from . import (
    CannotProveError,
    Evidence,
    Machine,
    commands,
    equality,
    streams,
    this_machine,
    timelines,
)
from . import __doc__ as description
from .report import Proof, Run, markdown, of_timelines

NO_GPU = """\
There is no GPU that torch sees, so nothing about GPUs can be proved here.
Rehearse the kit on the CPU with: python -m tests.gpu --device cpu"""


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


def compared(name: str, claim: str, seconds: float, of: str = "", gpus: int = 1) -> Part:
    return Part(name, claim, gpus, seconds, partial(equality.find, name=of or name))


TESTS, NOTEBOOKS = ("expecttest",), ("nbclient", "nbformat", "ipykernel")
ON_GLOO, ON_NCCL = (partial(commands.find_pytorch, nccl=nccl) for nccl in (False, True))
# The most valuable first: under --minutes, the last ones may not fit.
PARTS = (
    Part("streams", "no gradient is sent before it is computed", 1, 60, streams.find),
    compared("equality", "MiniDDP trains as torch's DDP does", 150, of="wrappers"),
    compared("precision", "half precision gives torch's", 40),
    compared("sharded", "fully_shard trains as torch's FSDP2 does", 90),
    compared("zero", "ZeRO trains as MiniDDP does", 30),
    compared("hooks", "comm hooks do what torch's do", 40),
    Part("memory", "ours holds no more memory than torch's", 1, 60, streams.find_memory),
    Part("overlap", "communication runs behind backward", 1, 60, timelines.find),
    Part("doctor", "the doctor changes nothing", 1, 60, commands.find_doctor),
    Part("certificate", "the certificate judges CUDA scripts", 1, 120, commands.find_certificate),
    Part("draws", "the emulated generator draws what a GPU draws", 1, 30, commands.find_draws),
    compared("muon", "Muon on shards gives torch's Muon", 30),
    compared("local", "local updates give torch's", 30),
    compared("meshes", "collectives run along one dimension", 30),
    compared("batch-norm", "SyncBatchNorm sees all ranks' batch", 20),
    compared("ladder", "the rungs of the ladder train so, too", 40, of="rungs"),
    compared("replicas", "MiniDataParallel sums", 20),
    Part("labs", "the labs hold on GPUs", 1, 100, commands.find_labs),
    Part("pytorch", "PyTorch's own tests of DDP pass", 1, 240, ON_GLOO, TESTS),
    compared("data-parallel", "MiniDataParallel beside torch's", 20, gpus=2),
    Part("pytorch-nccl", "they pass over NCCL", 2, 240, ON_NCCL, TESTS),
    Part("chapters", "every chapter runs on GPUs", 2, 300, commands.find_chapters, NOTEBOOKS),
)


def prove(part: Part, machine: Machine) -> Iterator[Proof]:
    """Run a part. An exception is a failure, with its first line as the detail."""

    def not_proved(reason: str) -> Proof:
        return Proof(part.name, part.claim, "", "not proved", reason)

    rehearsal = machine.kind == "cpu"
    if not rehearsal and len(machine.gpus) < part.gpus:
        yield not_proved(f"needs {part.gpus} GPUs, {len(machine.gpus)} here")
        return
    if absent := [name for name in part.needs if find_spec(name) is None]:
        yield not_proved(f"needs {', '.join(absent)}")
        return
    try:
        for what, on, holds, detail in part.find(machine):
            good = "rehearsed" if rehearsal else "proved"
            yield Proof(part.name, what, on, good if holds else "FAILED", detail)
    except CannotProveError as reason:
        yield not_proved(str(reason))
    except Exception as error:
        traceback.print_exc()
        late = isinstance(error, TimeoutError | subprocess.TimeoutExpired)
        if late and time.monotonic() >= machine.ends - 0.5:
            yield not_proved("did not end in its time")
            return
        first = (str(error).strip().splitlines() or [""])[0][:120]
        yield Proof(part.name, part.claim, "", "FAILED", f"{type(error).__name__}: {first}")


def prove_all(
    parts: list[Part], machine: Machine, minutes: float | None, report: Path | None
) -> list[Proof]:
    """All parts within the time; what is known so far is in `report` after each."""
    begin, proofs = time.monotonic(), list[Proof]()
    ends = begin + 60 * minutes if minutes else float("inf")
    for part in parts:
        left = ends - time.monotonic()
        if left < min(20.0, part.seconds / 2):
            late = f"did not fit into {minutes:g} minutes"
            proofs.append(Proof(part.name, part.claim, "", "not proved", late))
        else:
            machine.ends = time.monotonic() + (min(part.seconds, left) if minutes else 3600.0)
            for proof in prove(part, machine):
                proofs.append(proof)
                print(f"{proof.outcome:11}{proof.part}: {proof.what}", flush=True)
        if report:
            write(report, machine, proofs, time.monotonic() - begin)
    return proofs


def write(report: Path, machine: Machine, proofs: list[Proof], seconds: float) -> None:
    """Write it completely or not at all, so that a killed run leaves the last one."""
    run = Run(
        rehearsal=machine.kind == "cpu",
        command=" ".join(["python -m tests.gpu", *sys.argv[1:]]),
        date=f"{datetime.date.today():%Y-%m-%d}",
        seconds=seconds,
        versions=machine.versions(),
    )
    text = markdown(run, proofs)
    if machine.timelines:
        text += of_timelines(run, machine.timelines, report.with_suffix(".svg"))
    unfinished = report.with_name(report.name + ".unfinished")
    unfinished.write_text(text)
    unfinished.replace(report)


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
    add("--report", type=Path, help="write a report (Markdown) to this file, after each part")
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
    proofs = prove_all(parts, machine, options.minutes, options.report)
    print("\n" + table(["part", "what", "on", "", "found"], [list(proof) for proof in proofs]))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in machine.versions().items()))
    if machine.kind == "cpu":
        print("\nA rehearsal on the CPU: nothing in this table was proved on a GPU.")
    outcomes = {proof.outcome for proof in proofs}
    return int("FAILED" in outcomes or not outcomes & {"proved", "rehearsed"})


if __name__ == "__main__":
    sys.exit(main())
