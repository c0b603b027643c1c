"""What a certificate measured, and what follows from it: properties and a verdict. Plain data."""

import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

VERSION = 1
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
LeadsTo = Literal["equal", "conditional", "found", "not judged"]


@dataclass(frozen=True)
class Gap:
    """One gradient against another: the ratio of their lengths, and the cosine between them."""

    verdict: Kind
    ratio: float
    cosine: float


@dataclass(frozen=True)
class Measured:
    """The numbers of a certificate. An explanation of it has to predict one of them.

    A gap is None if there was no such step, or if something speaks against it: other samples, for
    example. `loss_is_a`: one process got every sample twice, and its gradient doubled (a sum,
    undivided or divided by a constant: then the ratio of `p1` is a factor only if that constant is
    known) or stayed (a mean). None: neither, or no such step.
    """

    world: int  # ranks
    passes: int  # backward passes of each rank in the first optimizer step
    passes_of_one: int | None = None  # of one process with all samples, in the same step
    p1: Gap | None = None
    p2: Gap | None = None
    p3: Gap | None = None
    usual: Gap | None = None
    optimizers: dict[int, Gap] = field(default_factory=dict)  # P1 of each, as they first stepped
    parameters: dict[str, Gap] = field(default_factory=dict)  # P1 of each that had a gradient
    shares: tuple[float, ...] | None = None  # one process's weight of each rank's samples; sum 1
    loss_is_a: Literal["sum", "mean"] | None = None
    diverges: bool = False  # whether a rank gets another gradient or other weights than rank 0
    leads_to: LeadsTo = "not judged"


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
    measured: Measured | None = None

    def as_json(self) -> dict[str, Any]:
        """A plain dict; see `VERSION`."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def of_json(cls, given: dict[str, Any]) -> Self:
        """What `as_json` returned."""
        properties = [Property(**_with_worst(one)) for one in given["properties"]]
        kept = {name: value for name, value in given.items() if name != "version"}
        measured = _measured(kept.get("measured"))
        return cls(**_with_worst(kept) | {"properties": properties, "measured": measured})

    def as_text(self, width: int = 100) -> str:
        """The certificate on a terminal, about ten lines."""
        out = ["─" * width, f"ddp-doctor certificate: {self.verdict.upper()}"]
        if self.world:
            several = f"{self.micro_batches} backward passes per step"
            micros = several if self.micro_batches > 1 else "1 micro-batch per step"
            out[1] += f", {self.world} rank{'s' * (self.world != 1)}, {micros}"
        if self.ratio is not None and self.cosine is not None:
            out[1] += f", {_numbers(self.ratio, self.factor, self.cosine)}"
        out += [*textwrap.wrap(self.why, width), ""]
        for one in self.properties:
            numbers = ""
            if one.ratio is not None and one.cosine is not None:
                numbers = _numbers(one.ratio, one.factor, one.cosine)
            out.append(f"  {one.name:6}{one.verdict:11} {numbers}".rstrip())
            repeated = one.judged or one.why == self.why
            said = TITLES[one.name] if repeated else f"{TITLES[one.name]}. {one.why}"
            out += textwrap.wrap(said, width, initial_indent=INDENT, subsequent_indent=INDENT)
        if self.worst is not None and self.verdict != "equal":
            out.append(f"  worst parameter: {self.worst}")
        if self.noise is not None:
            out.append(f"  noise: less than {10 ** math.ceil(math.log10(max(self.noise, 1e-6))):g}")
        out += ["", *[line for note in self.notes for line in textwrap.wrap(note, width)]]
        return "\n".join([*out, "─" * width])


def _measured(given: dict[str, Any] | None) -> Measured | None:
    if given is None:
        return None
    gaps = {name: given[name] and Gap(**given[name]) for name in ("p1", "p2", "p3", "usual")}
    by_optimizer = {int(at): Gap(**gap) for at, gap in given["optimizers"].items()}
    by_parameter = {name: Gap(**gap) for name, gap in given["parameters"].items()}
    shares = given["shares"] and tuple(given["shares"])
    groups = {"optimizers": by_optimizer, "parameters": by_parameter, "shares": shares}
    return Measured(**given | gaps | groups)


def _with_worst(given: dict[str, Any]) -> dict[str, Any]:
    worst = given["worst"]
    return given | {"worst": Worst(**worst) if worst else None}


def _numbers(ratio: float, factor: str | None, cosine: float) -> str:
    return f"ratio {ratio:.4f}{f' = {factor}' if factor else ''}, cosine {cosine:.4f}"
