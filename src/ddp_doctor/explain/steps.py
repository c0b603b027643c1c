"""The steps of a run: how each combined the ranks, and the losses that its backwards came through.

Of a loss term, two numbers are seen on each rank r and in each micro-batch k: the count n_rk of
items, and its *share* s_rk, the gradient that arrives there. It is 1 for a mean that is
back-propagated as it is, and 1/K for one that is divided by K micro-batches. With α of P0, the sum
T = α · Σ s_rk is 1 if every rank's and micro-batch's mean counts once and nothing else scales.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ddp_doctor.explain.combination import Combination, combination, rescaled
from ddp_doctor.explain.numbers import alike
from ddp_doctor.facts.merged import Run, Window
from ddp_doctor.facts.types import ScalingFact, TermFact, WindowFact


@dataclass(frozen=True)
class Entry:
    """One loss term of one rank in one micro-batch. `share` is s_rk, `count` is n_rk."""

    rank: int
    micro: int
    count: float
    share: float
    rows: int
    fact: TermFact


@dataclass(frozen=True)
class Step:
    """One optimizer step: P0, and its loss terms, the one that counts most first."""

    window: Window
    combination: Combination
    terms: list["Term"]

    @property
    def main(self) -> "Term | None":
        return self.terms[0] if self.terms else None


@dataclass(frozen=True)
class Term:
    """One loss term of a step, a function and its place, on all ranks that have it."""

    function: str
    place: str
    entries: list[Entry]
    scaling: list[ScalingFact]
    alpha: float | None
    several: bool  # its micro-batches are losses of their own: see `_several`

    @property
    def reduction(self) -> str:
        return self.entries[0].fact["reduction"]

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss function, and no sum or mean."""
        return self.entries[0].fact["loss"]

    @property
    def micros(self) -> int:
        """How many micro-batches it is in, on the rank with most."""
        return max(Counter(rank for rank, _ in {(e.rank, e.micro) for e in self.entries}).values())

    @property
    def items(self) -> float:
        """The items of this step over all ranks and micro-batches."""
        return sum(entry.count for entry in self.entries)

    @property
    def total(self) -> float | None:
        """T; None where α was not measured."""
        return None if self.alpha is None else self.alpha * sum(e.share for e in self.entries)

    @property
    def regular(self) -> bool:
        """Whether each rank and micro-batch has one such term."""
        return set(Counter((e.rank, e.micro) for e in self.entries).values()) == {1}

    def by(self, key: Callable[[Entry], Any]) -> dict[Any, Entry]:
        """The entries with the same key added up: of a rank, a micro-batch, or both."""
        sums: dict[Any, Entry] = {}
        for one in self.entries:
            known = sums.get(key(one), replace(one, count=0.0, share=0.0, rows=0))
            sums[key(one)] = replace(
                known,
                count=known.count + one.count,
                share=known.share + one.share,
                rows=known.rows + one.rows,
            )
        return dict(sorted(sums.items()))


def steps_of(run: Run) -> list[Step]:
    """The complete steps whose optimizer has gradients."""
    windows = [window for window in run.complete if window.trains]
    clipped = scaled_differently(windows)
    return [_step(window, run, clipped) for window in windows]


def scaled_differently(windows: list[Window]) -> bool:
    """Whether the script scales gradients after backward, by another factor in some step, and by no
    step's number of items: a clip does. A factor that is equal in all steps belongs to P0.
    """
    factors = [rescaled(window.facts) for window in windows]
    if alike(factors, 1e-3):
        return False
    products = []
    for window, factor in zip(windows, factors, strict=True):
        counts = [sum(entry.count for entry in of) for of in _entries(window).values()]
        products.append([count * factor for count in counts])
    constant = [alike(list(of), 1e-3) for of in zip(*products, strict=False)]
    return not any(constant)


def _step(window: Window, run: Run, clipped: bool) -> Step:
    combined = combination(window, run, clipped)
    entries = _entries(window)
    keys = sorted(entries, key=lambda key: _importance(entries[key]), reverse=True)
    return Step(window, combined, [_term(window, k, entries[k], combined.factor) for k in keys])


def _term(window: Window, key: tuple[str, str], entries: list[Entry], alpha: float | None) -> Term:
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
    scaling = [operation for fact in window.facts for operation in fact["scaling"]]
    distinct = {(each["op"], each["value"], each["place"], each["text"]): each for each in scaling}
    several = all(_several(fact, order[rank]) for rank, fact in window)
    return Term(*key, entries, list(distinct.values()), alpha, several)


def _entries(window: Window) -> dict[tuple[str, str], list[Entry]]:
    """The loss terms of all ranks by function and place, without penalties on parameters."""
    terms: dict[tuple[str, str], list[Entry]] = {}
    for rank, fact in window:
        for micro, backward in enumerate(fact["backwards"]):
            scale = backward.get("scale") or 1.0
            for term in backward.get("terms", ()):
                items = term["count"] if term["reduction"] == "sum" else 1.0
                share = term["factor"] * items / scale
                entry = Entry(rank, micro, term["count"], share, term["rows"], term)
                terms.setdefault((term["function"], term["place"]), []).append(entry)
    penalties = [key for key, of in terms.items() if any(e.fact.get("over_parameters") for e in of)]
    return {key: entries for key, entries in terms.items() if key not in penalties}


def _importance(entries: list[Entry]) -> tuple[bool, int, float]:
    """A loss function counts more than a mean; then how many backwards a term is in; its share."""
    backwards = {(entry.rank, entry.micro) for entry in entries}
    return entries[0].fact["loss"], len(backwards), sum(abs(entry.share) for entry in entries)


def _several(fact: WindowFact, micros: list[int]) -> bool:
    """Whether one helper is called several times per step, each time for its own loss.

    For example for real and fake samples, or for different tasks.
    The micro-batches of an accumulation come from one call in a loop. A last one, outside of the
    loop and of no_sync, comes less often.
    """
    calls = Counter(fact["backwards"][micro].get("call") for micro in micros)
    unsynced = any(not forward["sync"] for forward in fact["forwards"])
    return len(calls) > 1 and len(set(calls.values())) == 1 and not unsynced


def firsts(steps: list[Step]) -> list[Step]:
    """The first step of each optimizer: a certificate compares that one."""
    return list({step.window.optimizer: step for step in reversed(steps)}.values())
