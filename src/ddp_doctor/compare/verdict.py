"""What two commands have recorded, side by side."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ddp_doctor.certificate.files import read
from ddp_doctor.certificate.measure import Comparison, compare, unusable
from ddp_doctor.inputs import Rows, other_rows

SHOWN = 3  # rows, and parameters
# Optimizers whose updates do not change when every gradient is multiplied by the same factor.
SCALE_INVARIANT = {"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop"}


@dataclass
class Step:
    """One step of all optimizers. `other`: which rows only A or only B had; empty: none."""

    gradient: Comparison | None  # None if it is zero everywhere or not finite
    why: str
    other: list[str]


@dataclass
class Found:
    """The verdict on two commands."""

    worlds: list[int]  # processes of both
    verdict: str = "equal"
    why: str = ""
    steps: list[Step] = field(default_factory=list)
    weights: Comparison | None = None
    optimizers: set[str] = field(default_factory=set)  # classes of both

    def as_text(self, first: str, second: str) -> str:
        out = [f"ddp-doctor compare: {self.verdict.upper()}. {self.why}"]
        for letter, command, world in zip("AB", (first, second), self.worlds, strict=True):
            out.append(f"  {letter}  {command}  ({world} process{'es' * (world > 1)})")
        out += ["", "  step  samples  gradient of A against that of B"]
        for at, step in enumerate(self.steps):
            numbers = _numbers(step.gradient) if step.gradient else step.why
            out.append(f"  {at:<6}{'other' if step.other else 'same':9}{numbers}")
        if self.weights:
            out.append(f"  what the weights moved    {_numbers(self.weights)}{self._hidden()}")
        for at, step in enumerate(self.steps):
            if step.other:
                out += ["", f"  samples of step {at}:", *(f"    {line}" for line in step.other)]
                break
        unequal = [s.gradient for s in self.steps if s.gradient and s.gradient.kind != "equal"]
        if unequal:
            out += ["", "  worst parameters:"]
            out += [f"    {worst}" for worst in unequal[0].worst_first[:SHOWN]]
        return "\n".join(out)

    def _hidden(self) -> str:
        """Why weights may move alike although the gradients differ by a factor."""
        equal = self.weights is not None and self.weights.kind == "equal"
        if self.verdict != "scaled" or not equal or not self.optimizers <= SCALE_INVARIANT:
            return ""
        names = " and ".join(sorted(self.optimizers))
        return f"\n    (a factor has no effect on the updates of {names}, which hide it)"


def _numbers(found: Comparison) -> str:
    return f"{found.kind:10} ratio {found.ratio:.4f}, cosine {found.cosine:.4f}"


def conclude(first: Path, second: Path) -> Found:
    """Compare two folders that `record` wrote. The first step that is not equal decides."""
    folders = first, second
    counts = [len({f.name.split(".")[1] for f in of.glob("gradient.*.pt")}) for of in folders]
    found = Found([read(of / "rows.0.0.0.pt")[2] for of in folders])
    for number in range(min(counts)):
        step = _step(first, second, number)
        found.steps.append(step)
        if found.verdict != "equal":
            continue
        if step.other:
            found.verdict = "not judged"
            found.why = f"In step {number}, the models did not get the same samples."
        elif step.gradient is None:
            found.verdict, found.why = "not judged", f"In step {number}, {step.why}."
        elif step.gradient.kind != "equal":
            found.verdict = step.gradient.kind
            scaled = f"A's gradient is {step.gradient.ratio:.4g} times B's"
            other = "no factor makes the two gradients equal"
            said = scaled if found.verdict == "scaled" else other
            found.why = f"In step {number}, from the same samples, {said}."
    if found.verdict == "equal":
        found.why = f"{min(counts)} steps, the same samples, and the same gradients."
    if counts[0] != counts[1]:
        found.why += f" Then {'AB'[counts[1] < counts[0]]} ended, after {min(counts)} steps."
        found.verdict = "not judged" if found.verdict == "equal" else found.verdict
    _compare_weights(found, first, second)
    return found


def _compare_weights(found: Found, first: Path, second: Path) -> None:
    """What the weights moved in all steps. Equal gradients may move them differently."""
    if not all((folder / "moved.pt").exists() for folder in (first, second)):
        return
    ours, theirs = (read(folder / "moved.pt") for folder in (first, second))
    found.weights = compare(ours, theirs, {})
    found.optimizers = {read(folder / "optimizer.pt") for folder in (first, second)}
    if found.verdict != "equal" or found.weights.kind == "equal":
        return
    found.verdict = found.weights.kind
    found.why = "The gradients are equal, but the optimizers move the weights differently."
    for letter, moved in (("A", ours), ("B", theirs)):
        if broken := [name for name in sorted(moved) if not moved[name].isfinite().all()]:
            found.verdict = "not judged"
            found.why = f"After the steps, {letter}'s {broken[0]} holds NaN or infinity."


def _gradient(folder: Path, number: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob(f"gradient.{number}.*.pt")):
        found |= read(file)
    return found


def _step(first: Path, second: Path, number: int) -> Step:
    ours, theirs = (_gradient(folder, number) for folder in (first, second))
    other = _other(first, second, number)
    for letter, gradient in (("A", ours), ("B", theirs)):
        if why := unusable(gradient):
            return Step(None, f"{why} (command {letter})", other)
    for name in ours.keys() & theirs.keys():
        if ours[name].shape != theirs[name].shape:
            return Step(None, f"the gradients of {name} have other shapes", other)
    return Step(compare(ours, theirs, {}), "", other)


def _other(first: Path, second: Path, number: int) -> list[str]:
    """One line per row that only one command's models had, a few of each; empty if none is."""
    rows: list[list[Rows]] = []
    shown: dict[str, str] = {}
    for folder in (first, second):
        rows.append([])
        for file in sorted(folder.glob(f"rows.{number}.*.pt")):
            found, said, _ = read(file)
            rows[-1].append(found)
            shown |= said
    lines = []
    for slot, counters in other_rows(*rows).items():
        name = re.sub(r"^(\d+)\.(.*)\.0$", r"\2", slot)
        for letter, only in zip("AB", counters, strict=True):
            lines += _listed(letter, name, only, shown)
    return lines


def _listed(letter: str, name: str, only: Counter[str], shown: dict[str, str]) -> list[str]:
    if not only:
        return []
    first = [f"      {shown[digest]}" for digest in list(only)[:SHOWN]]
    return [f"argument {name}: {only.total()} rows only in {letter}, such as", *first]
