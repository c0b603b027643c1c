"""What a certificate measured, and what follows from it: properties and a verdict. Plain data."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

VERSION = 2
INDENT = " " * 8
TITLES = {
    "P1": "W ranks against one process with all their samples",
    "P2": "the samples dealt differently over ranks and micro-batches",
    "P3": "copies of one batch on every rank against one process with that batch",
    "usual": "as P1, with the script's own clipping and batch statistics",
    "later": "the ranks' gradients in further steps, against rank 0's",
}


@dataclass(frozen=True)
class Worst:
    """The parameter that is furthest off. The ratio is 0 or infinite if one of its gradients is
    zero, or so small beside the whole gradient that it is rounding.
    """

    name: str
    ratio: float
    cosine: float

    def __str__(self) -> str:
        if not self.ratio or math.isinf(self.ratio):
            return f"{self.name}, whose gradient is zero or rounding in one of the two only"
        return f"{self.name}, ratio {self.ratio:.4f}, cosine {self.cosine:.4f}"


@dataclass(frozen=True)
class Property:
    """One property: equal, scaled, different, or not judged; `why` says what that means."""

    name: str
    verdict: str
    why: str
    ratio: float | None = None
    cosine: float | None = None
    factor: str | None = None
    worst: Worst | None = None
    condition: str = ""  # of equal gradients: what they rest on, and was not shown

    @property
    def judged(self) -> bool:
        return self.verdict != "not judged"


Kind = Literal["equal", "scaled", "different"]


@dataclass
class Certificate:
    """The verdict on a script. `noise` is the relative difference of one step done twice."""

    verdict: str
    why: str
    ratio: float | None = None
    cosine: float | None = None
    factor: str | None = None
    worst: Worst | None = None
    noise: float | None = None
    world: int = 1
    micro_batches: int = 1
    properties: list[Property] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""  # what ended the script
    condition: str = ""  # of EQUAL: what it rests on, and was not shown
    # One process got every sample twice, and its gradient doubled (a sum, undivided or divided by a
    # constant) or stayed (a mean). None: neither, or no such step.
    loss_is_a: Literal["sum", "mean"] | None = None
    shares: Sequence[float] | None = None  # one process's weights of the ranks' samples; sum 1

    def as_json(self) -> dict[str, Any]:
        """A plain dict; see `VERSION`."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """What `as_json` returned."""
        properties = [Property(**_with_worst(row)) for row in values["properties"]]
        fields = {name: value for name, value in values.items() if name != "version"}
        return cls(**_with_worst(fields) | {"properties": properties})

    def as_text(self, width: int = 100) -> str:
        """The certificate on a terminal, about ten lines."""
        out = ["─" * width, f"ddp-doctor certificate: {self.verdict.upper()}"]
        if self.world:
            passes = f"{self.micro_batches} backward passes per step"
            micros = passes if self.micro_batches > 1 else "1 micro-batch per step"
            out[1] += f", {self.world} rank{'s' * (self.world != 1)}, {micros}"
        if self.ratio is not None and self.cosine is not None:
            out[1] += f", {_numbers(self.ratio, self.factor, self.cosine)}"
        out += [*textwrap.wrap(self.why, width), ""]
        for row in self.properties:
            numbers = ""
            if row.ratio is not None and row.cosine is not None:
                numbers = _numbers(row.ratio, row.factor, row.cosine)
            out.append(f"  {row.name:6}{row.verdict:11} {numbers}".rstrip())
            is_said = row.why in (TITLES[row.name], "") or row.why in self.why
            text = TITLES[row.name] if is_said else f"{TITLES[row.name]}. {row.why}"
            out += textwrap.wrap(text, width, initial_indent=INDENT, subsequent_indent=INDENT)
        if self.worst is not None and self.verdict != "equal":
            out.append(f"  worst parameter: {self.worst}")
        if self.noise is not None:
            out.append(f"  noise: less than {10 ** math.ceil(math.log10(max(self.noise, 1e-6))):g}")
        out += ["", *[line for note in self.notes for line in textwrap.wrap(note, width)]]
        return "\n".join([*out, "─" * width])


def _with_worst(values: dict[str, Any]) -> dict[str, Any]:
    worst = values["worst"]
    return values | {"worst": Worst(**worst) if worst else None}


def _numbers(ratio: float, factor: str | None, cosine: float) -> str:
    return f"ratio {ratio:.4f}{f' = {factor}' if factor else ''}, cosine {cosine:.4f}"
