"""``python -m tests.gpu``: prove what the GPUs here can prove, and print one table."""

import argparse
import datetime
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from labkit.book.tables import table

from . import __doc__ as description
from . import commands, measured, streams
from .equality import find, find_replicas
from .machine import CannotProveError, Evidence, Machine, this_machine

NO_GPU = """\
There is no GPU that torch sees, so nothing about GPUs can be proved here.
Rehearse the kit on the CPU with: python -m tests.gpu --device cpu"""


class Part(NamedTuple):
    """One claim, or a family of them. `gpus` is the least number of GPUs that it needs."""

    name: str
    claim: str
    gpus: int
    find: Callable[[Machine], Iterator[Evidence]]


PARTS = (
    Part("streams", "no gradient is sent before it is computed", 1, streams.find),
    Part("equality", "MiniDDP trains as torch's DDP does", 1, partial(find, kind="wrappers")),
    Part("ladder", "the rungs of the ladder train so, too", 1, partial(find, kind="rungs")),
    Part("hooks", "comm hooks do what they do under torch's DDP", 1, partial(find, kind="hooks")),
    Part("precision", "half precision gives torch's", 1, partial(find, kind="precision")),
    Part("replicas", "MiniDataParallel sums", 1, partial(find_replicas, devices=1)),
    Part("memory", "MiniDDP holds no more memory than torch's DDP", 1, measured.find_memory),
    Part("draws", "the emulated generator draws what a GPU draws", 1, measured.find_draws),
    Part("labs", "the labs hold on GPUs", 1, commands.find_labs),
    Part("doctor", "the doctor watches a run on GPUs and changes nothing", 1, commands.find_doctor),
    Part("pytorch", "PyTorch's own tests of DDP pass", 1, commands.find_pytorch),
    Part("data-parallel", "MiniDataParallel beside torch's", 2, partial(find_replicas, devices=2)),
    Part("overlap", "NCCL's kernels run behind computation", 2, measured.find_overlap),
    Part("chapters", "every chapter runs with its ranks on GPUs", 2, commands.find_chapters),
    Part("pytorch-nccl", "PyTorch's own tests of DDP pass over NCCL", 2, commands.find_nccl),
)


class Proof(NamedTuple):
    """One row of the table. `outcome` is "proved", "rehearsed", "not proved", or "FAILED"."""

    part: str
    what: str
    on: str
    outcome: str
    detail: str


def prove(part: Part, machine: Machine) -> Iterator[Proof]:
    """Run a part. An exception is a failure, with its first line as the detail."""
    rehearsal = machine.kind == "cpu"
    if not rehearsal and len(machine.gpus) < part.gpus:
        missing = f"needs {part.gpus} GPUs, {len(machine.gpus)} here"
        yield Proof(part.name, part.claim, "", "not proved", missing)
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
        yield Proof(part.name, part.claim, "", "FAILED", f"{type(error).__name__}: {first}")


def report(machine: Machine, shown: str, seconds: float) -> str:
    """The Markdown of a run: the table, the versions, and the date."""
    command = "make gpu" if machine.kind == "cuda" else "python -m tests.gpu --device cpu"
    versions = "\n".join(f"- {name}: {value}" for name, value in machine.versions().items())
    return (
        f"# What was proved on {', '.join(dict.fromkeys(machine.gpus)) or 'no GPU'}\n\n"
        f"`{command}`, {datetime.date.today():%Y-%m-%d}, {seconds:.0f} s.\n\n"
        f"{versions}\n\n```text\n{shown}\n```\n"
    )


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
    add("--report", type=Path, help="write the table and the versions to this Markdown file")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    parts = [p for p in PARTS if not options.names or any(name in p.name for name in options.names)]
    if not parts:
        print(f"No part is named like that. There are: {', '.join(p.name for p in PARTS)}")
        return 1
    if options.list:
        print("\n".join(f"{p.name:20}{p.gpus} GPU{'s' * (p.gpus > 1)}  {p.claim}" for p in parts))
        return 0
    machine = this_machine(options.device)
    if machine.kind == "cuda" and not machine.gpus:
        print(NO_GPU)
        return 2
    begin = time.monotonic()
    proofs: list[Proof] = []
    for part in parts:
        for proof in prove(part, machine):
            proofs.append(proof)
            print(f"{proof.outcome:11}{proof.part}: {proof.what}", flush=True)
    shown = table(["part", "what", "on", "", "found"], [list(proof) for proof in proofs])
    print(f"\n{shown}")
    if machine.kind == "cpu":
        print("\nA rehearsal on the CPU: nothing in this table was proved on a GPU.")
    if options.report:
        options.report.write_text(report(machine, shown, time.monotonic() - begin))
    outcomes = {proof.outcome for proof in proofs}
    return int("FAILED" in outcomes or not outcomes & {"proved", "rehearsed"})


if __name__ == "__main__":
    sys.exit(main())
