"""``python -m tests.gpu``: prove what the GPUs here can prove, and print one table."""

import argparse
import datetime
import json
import sys
from pathlib import Path

from . import __doc__ as description
from .machine import Machine, this_machine
from .parts import PARTS
from .proofs import Proof, exit_code, run, show

NO_GPU = """\
There is no GPU that torch sees, so nothing about GPUs can be proved here.
Rehearse the kit on the CPU with: python -m tests.gpu --device cpu"""


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
    add("--json", type=Path, help="write the proofs to this file")
    return parser.parse_args()


def report(machine: Machine, proofs: dict[str, list[Proof]], seconds: dict[str, float]) -> str:
    """The Markdown of a run."""
    command = "make gpu" if machine.kind == "cuda" else "python -m tests.gpu --device cpu"
    versions = "\n".join(f"- {name}: {value}" for name, value in machine.versions().items())
    return (
        f"# What was proved on {', '.join(dict.fromkeys(machine.gpus)) or 'no GPU'}\n\n"
        f"`{command}`, {datetime.date.today():%Y-%m-%d}, {sum(seconds.values()):.0f} s.\n\n"
        f"{versions}\n\n```text\n{show(proofs)}\n```\n"
    )


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
    proofs, seconds = run(parts, machine)
    print(f"\n{show(proofs)}")
    if machine.kind == "cpu":
        print("\nA rehearsal on the CPU: nothing in this table was proved on a GPU.")
    if options.report:
        options.report.write_text(report(machine, proofs, seconds))
    if options.json:
        found = {
            name: [[p.what, p.on, p.outcome.value, p.detail] for p in of_part]
            for name, of_part in proofs.items()
        }
        stored = {"versions": machine.versions(), "seconds": seconds, "proofs": found}
        options.json.write_text(json.dumps(stored, indent=1) + "\n")
    return exit_code(proofs)


if __name__ == "__main__":
    sys.exit(main())
