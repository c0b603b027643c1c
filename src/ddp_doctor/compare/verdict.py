"""What two commands have recorded, side by side."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ddp_doctor.certificate.measure import Comparison, compare
from ddp_doctor.inputs import Rows, other_rows

SHOWN = 3  # rows, and parameters


@dataclass
class Step:
    """One step of all optimizers. `other`: which rows only A or only B had; empty: none."""

    gradient: Comparison | None  # None if it is zero everywhere or not finite
    why: str
    other: list[str]
    worst: list[tuple[str, Comparison]]


@dataclass
class Found:
    """The verdict on two commands."""

    verdict: str = "equal"
    why: str = ""
    worlds: tuple[int, int] = (1, 1)
    steps: list[Step] = field(default_factory=list)
    weights: Comparison | None = None

    def as_text(self, first: str, second: str) -> str:
        out = [f"ddp-doctor compare: {self.verdict.upper()}. {self.why}"]
        for letter, command, world in zip("AB", (first, second), self.worlds, strict=True):
            out.append(f"  {letter}  {command}  ({world} process{'es' * (world > 1)})")
        out += ["", "  step  samples  gradient of A against that of B"]
        for at, step in enumerate(self.steps):
            numbers = _numbers(step.gradient) if step.gradient else step.why
            out.append(f"  {at:<6}{'other' if step.other else 'same':9}{numbers}")
        if self.weights:
            out.append(f"  what the weights moved    {_numbers(self.weights)}")
        for at, step in enumerate(self.steps):
            if step.other:
                out += ["", f"  samples of step {at}:", *(f"    {line}" for line in step.other)]
                break
        worst = next((step.worst for step in self.steps if step.worst), [])
        if worst:
            out += ["", "  worst parameters:"]
            out += [f"    {name}  {_numbers(found)}" for name, found in worst]
        return "\n".join(out)


def _numbers(found: Comparison) -> str:
    return f"{found.kind:10} ratio {found.ratio:.4f}, cosine {found.cosine:.4f}"


def conclude(first: Path, second: Path) -> Found:
    """Compare two folders that `record` wrote. The first step that is not equal decides."""
    counts = [_count(folder) for folder in (first, second)]
    found = Found(worlds=(_world(first), _world(second)))
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
    moved = [folder / "moved.pt" for folder in (first, second)]
    if all(file.exists() for file in moved):
        ours, theirs = (torch.load(file, weights_only=True) for file in moved)
        found.weights = compare(ours, theirs, {})
        if found.verdict == "equal" and found.weights.kind != "equal":
            found.verdict = found.weights.kind
            found.why = "The gradients are equal, but the optimizers move the weights differently."
    return found


def _count(folder: Path) -> int:
    steps = {int(file.name.split(".")[1]) for file in folder.glob("gradient.*.pt")}
    return max(steps, default=-1) + 1


def _world(folder: Path) -> int:
    world: int = json.loads((folder / "rows.0.0.0.json").read_text())[2]
    return world


def _gradient(folder: Path, number: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob(f"gradient.{number}.*.pt")):
        found |= torch.load(file, weights_only=True)
    return found


def _step(first: Path, second: Path, number: int) -> Step:
    ours, theirs = (_gradient(folder, number) for folder in (first, second))
    other = _other(first, second, number)
    for letter, gradient in (("A", ours), ("B", theirs)):
        if not all(bool(tensor.isfinite().all()) for tensor in gradient.values()):
            return Step(None, f"the gradient of {letter} holds NaN or infinity", other, [])
        if not any(bool(tensor.any()) for tensor in gradient.values()):
            return Step(None, f"the gradient of {letter} is zero everywhere", other, [])
    for name in ours.keys() & theirs.keys():
        if ours[name].shape != theirs[name].shape:
            return Step(None, f"the gradients of {name} have other shapes", other, [])
    found = compare(ours, theirs, {})
    worst: list[tuple[str, Comparison]] = []
    if found.kind != "equal":
        each = [
            (name, compare({name: ours[name]}, {name: theirs[name]}, {}))
            for name in sorted(ours.keys() & theirs.keys())
        ]
        worst = sorted(each, key=lambda one: -one[1].error)[:SHOWN]
    return Step(found, "", other, worst)


def _other(first: Path, second: Path, number: int) -> list[str]:
    """One line per row that only one command's models had, a few of each; empty if none is."""
    rows: list[list[Rows]] = []
    shown: dict[str, str] = {}
    for folder in (first, second):
        rows.append([])
        for file in sorted(folder.glob(f"rows.{number}.*.json")):
            found, said, _ = json.loads(file.read_text())
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
