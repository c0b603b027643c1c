"""P0: what the optimizer got, as a multiple of the sum of what the ranks' backwards computed.

The factor α is measured: gradients at the update are divided by the sum of the local gradients that
hooks saw, over all parameters. No trust in the wrapper's class is needed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ddp_doctor.explain.numbers import alike, near
from ddp_doctor.facts.merged import Run, Window
from ddp_doctor.facts.types import WindowFact, no_snapshot

Measured = Literal["averaged", "summed", "scaled", "no multiple", "not combined", "alone"]
Kind = Measured | Literal["in parts", "in backward", "unknown"]
FITS = 0.05  # of the gradients' length, that a factor may leave unexplained


@dataclass(frozen=True)
class Combination:
    """How the ranks' gradients became one. `factor` is α; None where it could not be measured.

    `place`: of the script's own all-reduce, if its backward has combined the ranks. "no multiple":
    no α fits; how much of the gradients it leaves is not known, as there is a number for each.
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
    pairs = _of_pieces(window, pieces) or _of_copies(window, common - own)
    factor = _measured([(final / rescale, local) for final, local in pairs])
    several = len(pairs) > 1  # a number for each: a single one fits any factor
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
        value and all(other.get(name) == value for other in local)
        for name, value in local[0].items()
    )
    return calls[0]["place"] if equal else ""


def _of_copies(window: Window, names: set[str]) -> list[tuple[float, float]]:
    """The final gradient of each parameter that all ranks have, and the sum of the local ones."""
    snapshots = list(window.snapshots().values())
    pairs = []
    for name in sorted(names):
        final = snapshots[0]["grads"].get(name)
        local = [part for s in snapshots if (part := s["local"].get(name)) is not None]
        if final is not None and local:
            pairs.append((final, sum(local)))
    return pairs


def _of_pieces(window: Window, pieces: dict[str, int]) -> list[tuple[float, float]]:
    """As `_of_copies`, of parameters that fully_shard splits: each rank computes all of them."""
    snapshots = window.snapshots()
    pairs = []
    for name, size in pieces.items():
        groups = window.groups(name)
        finals = [snapshots[group[0]]["grads"].get(name) for group in groups]
        locals_ = [snapshot["local"].get(name) for snapshot in snapshots.values()]
        known = [value for value in (*finals, *locals_) if value is not None]
        if len(groups) == size and len(known) == len(finals) + len(locals_):
            final = sum(value for value in finals if value is not None)
            pairs.append((final, sum(known) - final))
    return pairs


def _measured(pairs: list[tuple[float, float]]) -> float | None:
    """The factor between sums of local gradients and final ones.

    NaN if no factor explains them, and None if there are none.
    """
    product = sum(final * local for final, local in pairs)
    square = sum(local * local for _, local in pairs)
    final_square = sum(final * final for final, _ in pairs)
    if not square or not final_square or not math.isfinite(product):
        return None
    factor = product / square
    residual = math.sqrt(max(0.0, final_square - product * factor) / final_square)
    return factor if residual <= FITS else math.nan


def rescaled(facts: Iterable[WindowFact]) -> float:
    """The one factor by which a script scaled all gradients between backward and the update.

    1 if there is none: then `.grad` is what backward left, or the script combined the ranks' in
    between, which looks like a factor if they are equal.
    """
    pairs = []
    for fact in facts:
        if _reduces_gradients(fact):
            return 1.0
        now = fact["snapshot"]["grads"]
        for name, left in (fact["left"] or {}).items():
            final = now.get(name)
            if final is None:
                return 1.0
            if left:
                pairs.append((left, final))
    factors = [now / left for left, now in pairs]
    if not factors:
        return 1.0
    if alike(factors, 1e-4):
        return factors[0] if factors[0] > 0 else 1.0
    # In half precision every element was rounded: the factor that fits all of them best.
    factor = sum(now * left for left, now in pairs) / sum(left * left for left, _ in pairs)
    largest = max(abs(now) for _, now in pairs)
    fits = all(
        abs(now - factor * left) <= 0.02 * max(abs(now), 0.02 * largest) for left, now in pairs
    )
    return factor if fits and factor > 0 and not near(factor, 1.0) else 1.0


def untouched(fact: WindowFact) -> bool:
    """Whether the optimizer saw exactly the gradients that the last backward left."""
    grads = fact["snapshot"]["grads"]
    return bool(grads) and all(
        left is not None and left == grads.get(name) for name, left in (fact["left"] or {}).items()
    )


def _reduces_gradients(fact: WindowFact) -> bool:
    """Whether the script itself all-reduces gradients in this step."""
    return any(
        call["op"] == "all_reduce" and call.get("what") == "gradient"
        for call in fact["collectives"]
    )
