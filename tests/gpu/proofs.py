"""A part of the kit, what it proves, and the table of it all."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from labkit.book.tables import table

from .machine import Machine


class Outcome(Enum):
    """How a proof ended."""

    PROVED = "proved"
    REHEARSED = "rehearsed"
    FAILED = "FAILED"
    NOT_PROVED = "not proved"


class Proof(NamedTuple):
    """One line of the table: what was to be proved, on what, how it ended, and the numbers."""

    what: str
    on: str
    outcome: Outcome
    detail: str = ""


class Evidence(NamedTuple):
    """What a part found out on one group: whether the claim holds, and the numbers."""

    what: str
    on: str
    holds: bool
    detail: str


class CannotProveError(Exception):
    """Raised by a part whose claim nothing here can say anything about; the text says why."""


@dataclass(frozen=True)
class Part:
    """One claim, or a family of them. `gpus` is the least number of GPUs that it needs."""

    name: str
    claim: str
    gpus: int
    find: Callable[[Machine], Iterator[Evidence]]


def prove(part: Part, machine: Machine) -> Iterator[Proof]:
    """Run a part; an exception is a failure of the part, with its last line as the detail."""
    rehearsal = machine.kind == "cpu"
    if not rehearsal and len(machine.gpus) < part.gpus:
        missing = f"needs {part.gpus} GPUs, {len(machine.gpus)} here"
        yield Proof(part.claim, "", Outcome.NOT_PROVED, missing)
        return
    try:
        for what, on, holds, detail in part.find(machine):
            good = Outcome.REHEARSED if rehearsal else Outcome.PROVED
            yield Proof(what, on, good if holds else Outcome.FAILED, detail)
    except CannotProveError as reason:
        yield Proof(part.claim, "", Outcome.NOT_PROVED, str(reason))
    except Exception as error:
        traceback.print_exc()
        last = str(error).strip().splitlines() or [""]
        yield Proof(part.claim, "", Outcome.FAILED, f"{type(error).__name__}: {last[0][:120]}")


def run(parts: Iterable[Part], machine: Machine) -> tuple[dict[str, list[Proof]], dict[str, float]]:
    """Run all parts, print each proof as it comes; the proofs and the seconds by part."""
    proofs: dict[str, list[Proof]] = {}
    seconds: dict[str, float] = {}
    for part in parts:
        begin = time.monotonic()
        proofs[part.name] = []
        for proof in prove(part, machine):
            proofs[part.name].append(proof)
            print(f"{proof.outcome.value:11}{part.name}: {proof.what}", flush=True)
        seconds[part.name] = time.monotonic() - begin
    return proofs, seconds


def show(proofs: dict[str, list[Proof]]) -> str:
    """The table: one line per proof."""
    rows = [
        [name if number == 0 else "", proof.what, proof.on, proof.outcome.value, proof.detail]
        for name, found in proofs.items()
        for number, proof in enumerate(found)
    ]
    return table(["part", "what", "on", "", "found"], rows)


def exit_code(proofs: dict[str, list[Proof]]) -> int:
    """1 if anything failed, or nothing at all was proved or rehearsed; otherwise 0."""
    outcomes = [proof.outcome for found in proofs.values() for proof in found]
    good = Outcome.PROVED in outcomes or Outcome.REHEARSED in outcomes
    return int(Outcome.FAILED in outcomes or not good)
