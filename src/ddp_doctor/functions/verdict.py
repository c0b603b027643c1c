"""From what the processes measured to a verdict, and to the text that an error shows."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddp_doctor.certificate.measure import Comparison, factor_name
from ddp_doctor.functions.gradients import Measured
from ddp_doctor.functions.processes import Failed
from ddp_doctor.inputs import Rows, other_rows

Constant = Literal["rank", "all"]
Verdict = Literal["equal", "scaled", "different", "not judged"]
TITLES = {
    "P0": "what .grad holds, against the average of what autograd computed on each rank",
    "P1": "the ranks, against one process with all their samples",
    "P2": "the same samples dealt differently over the ranks",
    "replicas": "each rank's gradient, against rank 0's",
    "repeat": "the same step once more, with other seeds",
    "order": "one process with the samples in another order",
    "twice": "one process with every sample twice",
}
CLOSE = 5e-3  # relative; a ratio this near to a number is called by its name


@dataclass(frozen=True)
class Certificate:
    """The verdict, its reason, and each comparison by name (of all ranks, the worst)."""

    verdict: Verdict
    why: str
    ranks: int
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    def __str__(self) -> str:
        p1 = self.comparisons.get("P1")
        numbers = f", {_numbers(p1, self.ranks)}" if p1 else ""
        out = [f"{self.verdict.upper()}, {self.ranks} ranks{numbers}"]
        for line in self.why.splitlines():  # a traceback keeps its lines
            out += textwrap.wrap(line, 88, drop_whitespace=False) or [""]
        for name, title in TITLES.items():
            if found := self.comparisons.get(name):
                out += ["", f"  {name:9}{found.kind:10} {_numbers(found, self.ranks)}"]
                out += [f"{'':11}{title}"]
        worst = p1.worst if p1 and p1.kind != "equal" else None
        if worst:
            out += ["", f"  worst parameter: {worst}"]
        return "\n".join(out)


def _numbers(found: Comparison, ranks: int) -> str:
    name = factor_name(found.ratio, ranks)
    return f"ratio {found.ratio:.4f}{f' = {name}' if name else ''}, cosine {found.cosine:.4f}"


def conclude(
    found: tuple[Measured, ...] | Failed, ranks: int, constant: Constant | None
) -> Certificate:
    """The certificate. A violated premise or control is "not judged", whatever the gradients are.

    `constant`: by what a loss that is a sum is divided; without it, its factor is not judged.
    """
    if isinstance(found, Failed):
        return Certificate("not judged", f"{found.where} failed:\n\n{found.text}", ranks)
    *of_ranks, one = found
    comparisons = dict(of_ranks[0].comparisons) | one.comparisons
    for name in ("replicas", "repeat"):
        every = [of.comparisons[name] for of in of_ranks if name in of.comparisons]
        if every:
            comparisons[name] = max(every, key=lambda compared: compared.error)

    def certificate(verdict: Verdict, why: str) -> Certificate:
        return Certificate(verdict, why, ranks, comparisons)

    problems = [of.problem for of in found if of.problem]
    problems += [
        f"a gradient of {name} ({title}) holds NaN or infinity"
        for name, title in TITLES.items()
        if name not in comparisons and name != "P0"
    ]
    if problems:
        return certificate("not judged", f"Nothing was compared: {problems[0]}.")
    if comparisons["repeat"].kind != "equal":
        return certificate("not judged", REPEAT)
    if comparisons["replicas"].kind != "equal":
        return certificate("different", REPLICAS)
    if other := _other_samples([of.rows for of in of_ranks], one.rows):
        return certificate("not judged", other)
    if comparisons["order"].kind != "equal":
        return certificate("not judged", ORDER)
    verdict, why = _of_properties(comparisons, ranks, constant)
    return certificate(verdict, why if one.rows else why + UNSEEN)


REPEAT = (
    "The same step gives another gradient when it is repeated. Turn off what is random (dropout, "
    "noise, sampling), or what remembers earlier steps."
)
REPLICAS = (
    "The ranks hold different gradients, so their weights will diverge: nothing averages the "
    "gradients, or not all of them."
)
ORDER = (
    "In one process, the order of the samples changes the gradient, so one process is no "
    "reference. A mean of micro-batches' means does that if their counts differ, and so do losses "
    "over pairs and batch normalization."
)
UNSEEN = " This holds if the model got the samples of the batches: no call of a module was seen."
P2 = (
    "The same samples give another gradient when they are dealt differently over the ranks: a "
    "sample's weight depends on its rank or on its neighbors."
)
P1 = "One process with the same samples computes another gradient, and no factor repairs it."
EQUAL = "One process with the same samples computes the same gradient."
SUM = (
    "In one process, every sample twice gives twice the gradient, so the loss is a sum, undivided "
    "or divided by a constant. One process cannot tell which factor is right. If the constant is "
    "the number of samples per rank, pass constant='rank': the ranks then have {rank:.4g} times "
    "the right gradient. If it is that of all ranks, or if nothing divides, pass constant='all': "
    "they then have {all:.4g} times the right gradient."
)

CONSTANTS = {
    "rank": "the number of samples of one rank.",
    "all": "the number of samples of all ranks, or that nothing divides it.",
}


def _of_properties(
    comparisons: dict[str, Comparison], ranks: int, constant: Constant | None
) -> tuple[Verdict, str]:
    p0, p1, p2 = comparisons.get("P0"), comparisons["P1"], comparisons["P2"]
    if p1.kind == "different":
        said = ""
        if p0 and p0.kind == "different":
            said = " .grad does not hold the average of what the ranks computed (P0)."
        return "different", P1 + said
    if p2.kind != "equal":
        return "different", P2
    ratio = p1.ratio
    twice = comparisons["twice"]
    if twice.kind == "scaled" and abs(twice.ratio - 2) < CLOSE:  # the loss is a sum
        if constant is None:
            return "not judged", SUM.format(rank=ratio * ranks, all=ratio)
        ratio *= ranks if constant == "rank" else 1
        is_right = abs(ratio - 1) <= CLOSE
        times = "" if is_right else f"{ratio:.4g} times "
        why = f"The ranks have {times}the right gradient, given that the constant in the loss is "
        return "equal" if is_right else "scaled", why + CONSTANTS[constant]
    if p1.kind == "scaled":
        name = factor_name(ratio, ranks)
        said = f"{name} = {ratio:.4g}" if name else f"{ratio:.4g}"
        return "scaled", f"The gradient is {said} times that of one process with the same samples."
    return "equal", EQUAL


def _other_samples(ranks: Sequence[Rows], one: Rows) -> str:
    """What is not the same about the rows that the models got; empty if nothing is."""
    for slot, (ours, theirs) in other_rows(ranks, [one]).items():
        _, argument, *_ = slot.split(".")
        return (
            f"The model did not get the same samples: of argument {argument}, only the ranks had "
            f"{ours.total()} rows, and only one process {theirs.total()}. `backward` has to use "
            "the whole batch that it gets, and nothing else. Where `batches` or `join` pads, it "
            "has to pad to one length on all ranks."
        )
    return ""
