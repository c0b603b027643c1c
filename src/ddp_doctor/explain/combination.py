"""P0: what the optimizer got, as a multiple of the sum of what the ranks' backwards computed.

The factor α is measured: gradients at the update are divided by the sum of the local gradients that
hooks saw, over all parameters. No trust in the wrapper's class is needed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from ddp_doctor.explain.numbers import alike, near
from ddp_doctor.facts.merged import Run, Window
from ddp_doctor.facts.types import CollectiveFact, Groups, WindowFact, no_snapshot

Measured = Literal["averaged", "summed", "scaled", "no multiple", "not combined", "alone"]
Kind = Measured | Literal["in parts", "in backward", "unknown"]
FITS = 0.05  # of the gradients' length, that a factor may leave unexplained
Pairs = list[tuple[float, float]]  # a number of a final gradient, and of the sum of the local ones


@dataclass(frozen=True)
class Combination:
    """How the ranks' gradients became one. `factor` is α; None where it could not be measured.

    `place`: of the script's own all-reduce, if its backward has combined the ranks. "no multiple":
    no α fits; how much of the gradients it leaves is not known, as there are few numbers of each.
    """

    kind: Kind
    factor: float | None
    place: str = ""


def combination(window: Window, run: Run, clipped: bool = False) -> Combination:
    """Measure α from the gradients of one window.

    `clipped`: the script itself rescales gradients, by another factor in each step. That factor is
    then left out of α. Gradients that differ between the ranks are left out, unless all do.
    """
    names = {name for each in window.snapshots().values() for name in each["grads"]}
    common = {name for name in names if len(window.groups(name)) == 1}
    pieces = next(iter(window.snapshots().values()), no_snapshot())["pieces"]
    own = set(window.differing_gradients)
    if (run.in_groups and (own or run.split)) or (names and not common and not pieces):
        return Combination("in parts", None)
    if window.world > 1 and not names - own:
        return Combination("not combined", None)
    if place := _combined_in_backward(window, run):
        return Combination("in backward", None, place=place)
    if window.sharded and not pieces:
        return Combination("unknown", None)  # flat pieces, whose local gradients were not seen
    # Hooks saw gradients that still had the loss scale; the snapshot may be of unscaled ones.
    unscaled = next((s.get("unscaled") for s in window.snapshots().values()), None)
    rescale = 1 / unscaled if unscaled else rescaled(window.facts) if clipped else 1.0
    split = {name: of for name, n in pieces.items() if len(of := window.groups(name)) == n}
    held = split or {name: [list(window.ranks)] for name in sorted(common - own)}
    pairs = [pair for name, groups in held.items() for pair in _pairs(window, name, groups)]
    factor = _measured([(final / rescale, local) for final, local in pairs])
    # Of fewer numbers, or if the others are small, any factor may fit.
    least = FITS * math.hypot(*(final for final, _ in pairs))
    several = sum(abs(final) > least for final, _ in pairs) >= 4
    if window.world == 1:
        return Combination("alone", factor if factor and factor > 0 and several else 1.0)
    if factor is None:
        return Combination("unknown", None)
    if math.isnan(factor):
        return Combination("no multiple", None)
    if near(factor * window.world, 1.0, 0.02):
        return Combination("averaged", 1.0 / window.world)
    if near(factor, 1.0, 0.02):
        return Combination("summed", factor)
    return Combination("scaled", factor) if several else Combination("unknown", None)


def _combined_in_backward(window: Window, run: Run) -> str:
    """Where a backward of the script's own reduces gradients, if all ranks' are equal after it.

    What each rank computed before is not seen. Empty where ranks hold parts of a model.
    """
    calls = [
        call
        for fact in window.facts
        for call in fact["collectives"]
        if call["in_backward"] and call["through_autograd"] and "reduce" in call["op"]
    ]
    if not calls or run.wrappers or run.split:
        return ""
    local = [snapshot["local"] for snapshot in window.snapshots().values()]
    equal = any(
        any(value or ()) and all(other.get(name) == value for other in local)
        for name, value in local[0].items()
    )
    return calls[0]["place"] if equal else ""


def _pairs(window: Window, name: str, groups: Groups) -> Pairs:
    """What these groups of ranks hold of a final gradient, and the sum of the ranks' local ones.

    With fully_shard, each group has a piece, and each rank computes the gradient of all pieces.
    """
    snapshots = window.snapshots()
    finals = [part for of in groups if (part := snapshots[of[0]]["grads"].get(name)) is not None]
    local = [part for one in snapshots.values() if (part := one["local"].get(name)) is not None]
    if len(finals) < len(groups):
        return []
    final, given = ([sum(of) for of in zip(*each, strict=False)] for each in (finals, local))
    return list(zip(final, given, strict=False))


def _measured(pairs: Pairs) -> float | None:
    """The factor between sums of local gradients and final ones.

    NaN if no factor explains them, and None if there are none.
    """
    length, given = (math.hypot(*numbers) for numbers in zip(*pairs or [(0.0, 0.0)], strict=True))
    if not length or not given or not math.isfinite(length * given):
        return None
    factor = _best(pairs)
    left = math.hypot(*(final - factor * local for final, local in pairs))
    return factor if left <= FITS * length else math.nan


def _best(pairs: Pairs) -> float:
    """The factor that fits all pairs best."""
    return sum(one * other for one, other in pairs) / sum(other * other for _, other in pairs)


def rescaled(facts: Iterable[WindowFact]) -> float:
    """The one factor by which a script scaled all gradients between backward and the update.

    1 if there is none: then `.grad` is what backward left, or the script combined the ranks' in
    between, which looks like a factor if they are equal.
    """
    of_each: list[Pairs] = []
    for fact in facts:
        if any(map(reduces_gradient, fact["collectives"])):
            return 1.0
        now = fact["snapshot"]["grads"]
        for name, left in (fact["left"] or {}).items():
            final = now.get(name)
            if final is None:
                return 1.0
            if left and any(left):
                of_each.append(list(zip(final, left, strict=False)))
    if not of_each:
        return 1.0
    factors, factor = [_best(pairs) for pairs in of_each], _best([*chain(*of_each)])
    lengths = [math.hypot(*(final for final, _ in pairs)) for pairs in of_each]
    fits = all(
        math.hypot(*(final - factor * left for final, left in pairs))
        <= 0.02 * max(length, 0.02 * max(lengths))
        for pairs, length in zip(of_each, lengths, strict=True)
    )
    # In half precision every element was rounded: a factor that is nearly 1 may be none.
    exact = alike(factors, 1e-4) or not near(factor, 1.0)
    return factor if fits and exact and factor > 0 else 1.0


def untouched(fact: WindowFact) -> bool:
    """Whether the optimizer saw exactly the gradients that the last backward left."""
    grads = fact["snapshot"]["grads"]
    return bool(grads) and all(
        left is not None and left == grads.get(name) for name, left in (fact["left"] or {}).items()
    )


def reduces_gradient(call: CollectiveFact) -> bool:
    """Whether the script itself all-reduces a gradient by this call."""
    return call["op"] == "all_reduce" and call.get("what") == "gradient"
