"""The equation of a run: what one optimizer step computes, from what was seen.

Wanted is the gradient of Σ ℓ_i / N over the N items of one optimizer step, on all ranks and in all
micro-batches. Seen are, for each rank r and micro-batch k, the count n_rk of items in the loss and
its *share* s_rk: the gradient that arrives there, which is the total weight of these items before
the ranks are combined. The wrapper multiplies by α (1/W if it averages). So

    weight of an item   w_rk = α · s_rk / n_rk        wanted: 1/N for every item
    sum of all weights  T    = α · Σ s_rk             wanted: 1

α is measured (see `combination`).
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ddp_doctor.explain.combination import (
    Combination,
    combination,
    rescaled,
    through_reductions,
)
from ddp_doctor.explain.findings import Finding
from ddp_doctor.explain.numbers import TOLERANCE, alike, near, number
from ddp_doctor.facts.merged import Run, Window
from ddp_doctor.facts.types import Groups, ScalingFact, TermFact, WindowFact

LITERAL = re.compile(r"[\d.e+-]+", re.IGNORECASE)


def is_literal(operation: ScalingFact) -> bool:
    """Whether the code writes a factor as a number."""
    return bool(LITERAL.fullmatch(operation["operand"]))


@dataclass(frozen=True)
class Entry:
    """One loss term of one rank in one micro-batch. `share` is s_rk, `count` is n_rk."""

    rank: int
    micro: int
    count: float
    share: float
    fact: TermFact


@dataclass
class Step:
    """The equation of one optimizer step."""

    window: Window
    world: int
    micros: int
    combination: Combination
    entries: list[Entry]
    function: str
    reduction: str
    place: str
    scaling: list[ScalingFact]
    others: list["Step"] = field(default_factory=list)  # the loss's other terms
    several: bool = False  # its micro-batches are losses of their own: see `_several`
    readers: int = 0  # groups of ranks with data of their own

    @property
    def optimizer(self) -> int:
        return self.window.optimizer

    @property
    def alpha(self) -> float:
        """α, or what an average over the ranks would do where it was not measured."""
        factor = self.combination.factor
        return 1.0 / self.world if factor is None else factor

    @property
    def items(self) -> float:
        """N: the items of this step over all ranks and micro-batches."""
        return sum(entry.count for entry in self.entries)

    @property
    def total(self) -> float:
        """T: the sum of all weights."""
        return self.alpha * sum(entry.share for entry in self.entries)

    @property
    def coefficient(self) -> float:
        """The product of the factors that the code writes as numbers, times the terms per backward.

        Such a factor is a choice, and no mistake about counts.
        """
        product = 1.0
        for operation in self.scaling:
            if is_literal(operation) and operation["value"] > 0:
                product *= operation["value"] if operation["op"] == "*" else 1 / operation["value"]
        calls = set(Counter((entry.rank, entry.micro) for entry in self.entries).values())
        return product * (calls.pop() if len(calls) == 1 else 1)

    @property
    def terms_differ(self) -> bool:
        """Whether some ranks or micro-batches have more loss terms than others."""
        calls = Counter((entry.rank, entry.micro) for entry in self.entries)
        return len(set(calls.values())) > 1

    @property
    def leftover(self) -> bool:
        """Whether the gradients that the step before used were still there when this one began."""
        return any(self.window.leftover(fact) for _, fact in self.window)

    def weights(self) -> list[tuple[Entry, float]]:
        """Each entry's weight of one item, relative to 1/N."""
        return [
            (entry, self.alpha * entry.share / entry.count * self.items)
            for entry in self.entries
            if entry.count
        ]

    @property
    def spread(self) -> float:
        """Largest weight divided by the smallest."""
        values = [abs(weight) for _, weight in self.weights() if weight]
        return max(values) / min(values) if values else 1.0

    def by(self, key: Callable[[Entry], Any]) -> dict[Any, tuple[float, float]]:
        """(items, share) of the entries with the same key: a rank, a micro-batch, or both."""
        sums: dict[Any, tuple[float, float]] = {}
        for entry in self.entries:
            count, share = sums.get(key(entry), (0.0, 0.0))
            sums[key(entry)] = (count + entry.count, share + entry.share)
        return dict(sorted(sums.items()))


def step_of(window: Window, clipped: bool = False, run: Run | None = None) -> Step | None:
    """The equation of a window, for its main loss term. None if no loss was seen.

    `run` knows which ranks read the same data; each has its own unless it is given.
    """
    terms = _terms(window)
    if not terms:
        return None
    readers = [[rank] for rank in window.ranks] if run is None else run.readers
    combined = combination(window, clipped, run)
    keys = sorted(terms, key=lambda key: _importance(terms[key]), reverse=True)
    main, *others = (_of_term(window, key, terms[key], combined, readers) for key in keys)
    return replace(main, others=others)


def _of_term(
    window: Window,
    key: tuple[str, str],
    entries: list[Entry],
    combined: Combination,
    readers: Groups,
) -> Step:
    """The equation for one loss term: a function and its place."""
    # Micro-batches are the backward passes that this term is in, counted per rank from 0.
    order = {
        rank: sorted({entry.micro for entry in entries if entry.rank == rank})
        for rank in window.ranks
    }
    sign = -1.0 if all(entry.share < 0 for entry in entries) else 1.0  # a loss that is minus a sum
    entries = [
        replace(entry, micro=order[entry.rank].index(entry.micro), share=sign * entry.share)
        for entry in entries
    ]
    if combined.kind == "apart" and combined.factor is not None:
        trained = len({entry.rank for entry in entries})  # the last stage only, or own models
        combined = replace(combined, factor=combined.factor / trained)
    scaling = [operation for _, fact in window for operation in fact["scaling"]]
    distinct = {(each["op"], each["value"], each["place"], each["text"]): each for each in scaling}
    return Step(
        window=window,
        world=window.world,
        micros=max((len(micros) for micros in order.values()), default=0),
        combination=combined,
        entries=_counted_once(entries, readers),
        readers=len(readers),
        function=key[0],
        reduction=entries[0].fact["reduction"],
        place=key[1],
        scaling=list(distinct.values()),
        several=all(_several(fact, order[rank]) for rank, fact in window),
    )


def _terms(window: Window) -> dict[tuple[str, str], list[Entry]]:
    """The loss terms of all ranks by function and place, without penalties on parameters."""
    terms: dict[tuple[str, str], list[Entry]] = {}
    for rank, fact in window:
        for micro, backward in enumerate(fact["backwards"]):
            scale = backward.get("scale") or 1.0
            for term in backward.get("terms", ()):
                entry = Entry(rank, micro, term["count"], _share(term) / scale, term)
                terms.setdefault((term["function"], term["place"]), []).append(entry)
    penalties = [key for key, of in terms.items() if any(e.fact.get("over_parameters") for e in of)]
    return {key: entries for key, entries in terms.items() if key not in penalties}


def _importance(entries: list[Entry]) -> tuple[bool, int, float]:
    """A loss function counts more than a mean; then how many backwards a term is in; its share."""
    backwards = {(entry.rank, entry.micro) for entry in entries}
    return entries[0].fact["loss"], len(backwards), sum(abs(entry.share) for entry in entries)


def _counted_once(entries: list[Entry], readers: Groups) -> list[Entry]:
    """One entry for each term that several ranks compute from the same data: their shares add up.

    Its items are those of one of these ranks.
    """
    leader = {rank: group[0] for group in readers for rank in group}
    found: dict[tuple[int, int, int], Entry] = {}
    calls: Counter[tuple[int, int]] = Counter()
    for entry in entries:
        at = entry.rank, entry.micro
        key = (leader[entry.rank], entry.micro, calls[at])
        calls[at] += 1
        share = found[key].share + entry.share if key in found else entry.share
        found[key] = replace(found.get(key, entry), rank=key[0], share=share)
    return list(found.values())


def _several(fact: WindowFact, micros: list[int]) -> bool:
    """Whether one helper is called several times per step, each time for its own loss.

    For example for real and fake samples, or for different tasks.
    The micro-batches of an accumulation come from one call in a loop. A last one, outside of the
    loop and of no_sync, comes less often.
    """
    calls = Counter(fact["backwards"][micro].get("call") for micro in micros)
    unsynced = any(not forward["sync"] for forward in fact["forwards"])
    return len(calls) > 1 and len(set(calls.values())) == 1 and not unsynced


def _share(term: TermFact) -> float:
    factor = term["factor"]
    return factor * term["count"] if term["reduction"] == "sum" else factor


@dataclass
class Equation:
    """The equation that the report shows: one step, chosen, and how usual it is."""

    step: Step | None
    steps: list[Step]
    world: int
    right: bool
    about: list[str]  # lines: what was seen
    weights: list[str] = field(default_factory=list)  # lines
    wrong: bool = False  # whether `weights` shows a wrong sum
    weighed: bool = True  # whether the weights are those of the whole loss

    @property
    def lines(self) -> list[str]:
        return self.about + self.weights

    def contradicts(self, findings: list[Finding]) -> bool:
        """Whether it shows a wrong sum of weights that no finding is about."""
        said = any(one.severity != "note" or "_denominators" in one.code for one in findings)
        return self.wrong and not said

    def saying(self, line: str) -> Self:
        """The same, with `line` instead of what one term tells about the weights."""
        return replace(self, weights=[line], right=False, wrong=False, weighed=False)

    def as_json(self) -> dict[str, Any]:
        """The numbers, for `--json`."""
        if self.step is None:
            return {"world_size": self.world, "seen": False, "lines": self.lines}
        step = self.step
        return {
            "seen": True,
            "world_size": step.world,
            "micro_batches": step.micros,
            "items": step.items,
            "loss": {"function": step.function, "reduction": step.reduction, "where": step.place},
            "combination": step.combination.kind,
            "combination_factor": step.combination.factor,
            "right": self.right,
            "step": step.window.n,
            "lines": self.lines,
        } | (self._weights(step) if self.weighed else {})

    def _weights(self, step: Step) -> dict[str, Any]:
        weights = [
            {"rank": e.rank, "micro_batch": e.micro, "items": e.count, "weight_times_N": w}
            for e, w in step.weights()
        ]
        return {"sum_of_weights": step.total, "weights": weights}


def equation(run: Run) -> Equation:
    """Analyze every complete window; show the most common kind of them."""
    # A factor that is equal in all steps belongs to the gradient; a clip's differs between steps.
    windows = [window for window in run.complete if window.trains]
    factors = [rescaled(window) for window in windows]
    clipped = not alike(factors, 1e-3) and not _divides_by_counts(windows, factors)
    found = [step_of(window, clipped, run) for window in windows]
    steps = [step for step in found if step is not None]
    if not steps:
        seen = "no loss function" if windows else "no step of an optimizer with gradients"
        inside = [fact for each in run.complete for _, fact in each if "combined_in_step" in fact]
        if inside and not windows:
            seen = (
                "how the ranks are combined. The optimizer does it inside of its step, at "
                + inside[0]["combined_in_step"]
            )
        more = _in_step(run) if inside and not windows else []
        seen = seen if run.complete else "no complete optimizer step"
        if not run.complete and any(window.cut for window in run.windows):
            seen = "the steps have too many backward passes to record"
        return Equation(None, [], run.world, False, [f"Not seen: {seen}.", *more])
    signature = Counter(_signature(step) for step in steps)
    usual = signature.most_common(1)[0][0]
    step = next(step for step in steps if _signature(step) == usual)
    worst = max((step for step in steps if _signature(step) == usual), key=lambda e: e.spread)
    step = worst if worst.spread > 1 + TOLERANCE else step
    right = near(step.total, 1.0) and step.spread <= 1 + TOLERANCE and not step.leftover
    right = right and step.combination.kind not in ("unknown", "not combined", "in groups")
    said = _instead_of_a_sum(step, right)
    weights = [said] if said else _weights(step)
    return Equation(step, steps, run.world, right, _about(step), weights, wrong=not said)


def _in_step(run: Run) -> list[str]:
    """What is known of reductions in an optimizer's step: not what it does with the result."""
    factors = [factor for window in run.complete if (factor := through_reductions(window)[0])]
    if len(factors) < len(run.complete) or not alike(factors):
        return []
    sent = {name for window in run.complete for _, f in window for name in f.get("reduced", {})}
    return [
        f"sent      all that backward computed of {len(sent)} parameters",
        f"result    the sum of the ranks' gradients × {number(factors[0])}; the rest is not seen",
    ]


def _divides_by_counts(windows: list[Window], factors: list[float]) -> bool:
    """Whether the script divides the gradients of each step by that step's number of items."""
    steps = [step_of(window) for window in windows]
    products = [
        step.items * factor for step, factor in zip(steps, factors, strict=True) if step is not None
    ]
    return len(products) > 1 and alike(products, 1e-3)


def _signature(step: Step) -> tuple[Any, ...]:
    kind = step.combination.kind
    return (step.optimizer, step.micros, kind, step.leftover, f"{step.total:.1g}")


def _about(step: Step) -> list[str]:
    """What was seen: items, the loss, its factors, and how the ranks are combined."""
    counts = [items for items, _ in step.by(lambda entry: (entry.rank, entry.micro)).values()]
    count = (
        number(counts[0]) if alike(counts, 0.0) else f"{number(min(counts))}–{number(max(counts))}"
    )
    ranks = f"{step.world} rank{'s' * (step.world != 1)}"
    if step.readers < step.world:
        ranks += f", which read {step.readers} batch{'es' * (step.readers != 1)}"
    micros = f"{step.micros} micro-batch{'es' * (step.micros != 1)}"
    reduction = {"mean": "averages", "sum": "sums", "none": "returns one loss per item"}
    lines = [
        f"{ranks} × {micros} × {count} items = N = {number(step.items)} items per step",
        f"loss      {step.function} at {step.place or '?'} {reduction.get(step.reduction, '')}",
    ]
    factors = [operation for operation in step.scaling if operation["value"] not in (0.0, 1.0)]
    for operation in factors[:3]:
        name = f"{operation['text']}  ({operation['op']} {number(operation['value'])})"
        lines.append(f"factor    {name} at {operation['place']}")
    scaled = ", nothing to combine" if near(step.alpha, 1.0) else f", × {number(step.alpha)}"
    combines = {
        "averaged": f"averages over the ranks (× 1/{step.world})",
        "summed": "sums over the ranks (× 1)",
        "scaled": f"combines the ranks with × {number(step.alpha)}",
        "not combined": "nothing: the ranks apply different gradients",
        "in groups": "not measured: the wrapper combines the ranks of its group only",
        "unknown": f"not measured; taken as × 1/{step.world}"
        if step.combination.residual <= 0.05
        else f"{step.combination.residual:.0%} of what the optimizer gets is no multiple of the "
        "sum of the ranks' gradients",
        "alone": f"one rank{scaled}",
        "apart": "nothing: each rank has a model, or a part of one, of its own",
    }
    return [*lines, f"combine   {combines[step.combination.kind]}"]


def _instead_of_a_sum(step: Step, right: bool) -> str:
    """What is said of the weights if their sum is 1, or tells nothing; empty if it is wrong."""
    if step.combination.local:
        where = "in its group" if step.combination.kind == "in groups" else "on its own rank"
        return f"weight    each item counts {where} only"
    if step.combination.kind == "unknown" and step.combination.residual > 0.05:
        return "weight    not measured"
    if step.leftover:
        return "weight    the gradients of earlier steps are in this one, too"
    if right and any(entry.fact.get("weighted") for entry in step.entries):
        return "weight    every item weighs 1/N, times the weight that the loss is given for it"
    if right:
        return "weight    every item weighs 1/N"
    if step.several:
        return "weight    several calls compute a loss each, and their gradients are added"
    return ""


def _weights(step: Step) -> list[str]:
    """Weights that are not 1/N, or whose sum is not 1."""
    values = [weight for _, weight in step.weights()] or [0.0]
    said = f"every item weighs {number(values[0])}"
    if not alike(values):
        said = f"items weigh from {number(min(values))} to {number(max(values))}"
    return [
        f"weight    {said} times 1/N",
        f"sum       all weights together: {number(step.total)}, wanted: 1",
    ]


def by_optimizer(ones: list[Any]) -> dict[int, list[Any]]:
    """Windows, or steps, of each optimizer."""
    found: dict[int, list[Any]] = {}
    for one in ones:
        found.setdefault(one.optimizer, []).append(one)
    return found


def usual_length(steps: list[Step]) -> int:
    """The most common number of micro-batches per step; of two equally common ones the larger."""
    counts = Counter(step.micros for step in steps)
    return max(counts, key=lambda length: (counts[length], length))
