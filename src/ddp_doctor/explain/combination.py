"""P0: what the optimizer got, as a multiple of the sum of what the ranks' backwards computed.

The factor α is measured: gradients at the update are divided by the sum of the local gradients that
hooks saw, over all parameters. No trust in the wrapper's class is needed.
"""

import math
from dataclasses import dataclass
from typing import Literal

from ddp_doctor.explain.numbers import alike, near
from ddp_doctor.facts.merged import Run, Window
from ddp_doctor.facts.types import Groups, WindowFact, no_snapshot

Kind = Literal[
    "averaged", "summed", "scaled", "not combined", "in groups", "in backward", "apart", "unknown",
    "alone",
]  # fmt: skip
FITS = 0.05  # of the gradients' length, that a factor may leave unexplained


@dataclass(frozen=True)
class Combination:
    """How the ranks' gradients became one. `factor` is α; None where it could not be measured.

    `place`: of the script's own all-reduce, if its backward has combined the ranks.
    """

    kind: Kind
    factor: float | None
    residual: float = 0.0  # the part of the gradients that no factor explains
    place: str = ""


def combination(window: Window, run: Run, clipped: bool = False) -> Combination:
    """Measure α from the gradients of one window.

    `clipped`: the script itself rescales gradients, by another factor in each step. That factor is
    then left out of α. Gradients that differ between the ranks are left out, unless all do.
    """
    parts = any(len(each) > 1 for each in window.copies.values())
    if run.in_groups and (parts or window.differing_gradients):
        return Combination("in groups", None)
    if window.world > 1 and not _names(window) - set(window.differing_gradients):
        return Combination("not combined", None)
    if place := combined_in_backward(window, run):
        return Combination("in backward", None, place=place)
    if (handed := _of_own_reductions(window)) is not None:
        return handed
    if window.sharded and not all(fact["dtensors"] for _, fact in window):
        return Combination("unknown", None)  # flat pieces, whose local gradients were not seen
    # Hooks saw gradients that still had the loss scale; the snapshot may be of unscaled ones.
    unscaled = next((s.get("unscaled") for s in window.snapshots().values()), None)
    rescale = 1 / unscaled if unscaled else rescaled(window) if clipped else 1.0
    pairs = _pairs(window, rescale, run.readers)
    factor, residual = _measured(pairs)
    if window.world == 1:
        several = len(pairs) > 1
        return Combination("alone", factor if factor and factor > 0 and several else 1.0, residual)
    if not _pairs_of_pieces(window, rescale):
        factor = _of_parts(window, run, factor)
        if factor is None:
            factor = _by_fsdp(window, len(run.readers))
            factor = factor if factor is None or clipped else factor * rescaled(window)
    if factor is None:
        return Combination("unknown", None, 0.0 if _added_up(window) else residual)
    return Combination("apart", factor, residual) if run.apart else _named(window, factor, residual)


def combined_in_backward(window: Window, run: Run) -> str:
    """Where a backward of the script's own reduces gradients, if all ranks' are equal after it.

    What each rank computed before is not seen. Empty where ranks share their data.
    """
    calls = [
        call
        for _, fact in window
        for call in fact["collectives"]
        if call["in_backward"] and call["through_autograd"] and "reduce" in call["op"]
    ]
    if not calls or len(run.readers) < run.world:
        return ""
    local = [snapshot["local"] for snapshot in window.snapshots().values()]
    equal = any(
        value and all(other.get(name) == value for other in local)
        for name, value in local[0].items()
    )
    return calls[0]["place"] if equal and not run.wrappers else ""


def _of_own_reductions(window: Window) -> Combination | None:
    """α where optimizers step pieces of what the script's own reductions have returned.

    What every rank sent is compared with what its backwards computed, and all that came back with
    the sum of that. None where it was not seen, or where the optimizer's gradients are others.
    """
    known = [factor for _, fact in window if (factor := fact.get("handed"))]
    if len(known) < window.world or not alike(known):
        return None
    factor, residual = through_reductions(window)
    if factor is None:
        return Combination("unknown", None, residual) if residual else None
    return _named(window, factor * known[0], residual)


def _named(window: Window, factor: float, residual: float) -> Combination:
    if near(factor * window.world, 1.0, 0.02):
        return Combination("averaged", 1.0 / window.world, residual)
    return Combination("summed" if near(factor, 1.0, 0.02) else "scaled", factor, residual)


def through_reductions(window: Window) -> tuple[float | None, float]:
    """The factor between all that the ranks' backwards computed and what their own reductions
    returned, and what it leaves unexplained. None and 0 where that was not seen.
    """
    reduced = [fact.get("reduced", {}) for _, fact in window]
    names = set(reduced[0]).intersection(*reduced) if reduced else set()
    unread = any("unread" in fact for _, fact in window)
    if not names or unread or any(set(one) != names for one in reduced):
        return None, 0.0
    pairs = []
    for name in sorted(names):
        facts = [one[name] for one in reduced]
        got = [one["got"] for one in facts if one["got"] is not None]
        local = [one["local"] for one in facts if one["local"] is not None]
        if not got or len(local) < len(facts):
            return None, 0.0
        pairs.append((sum(got) if facts[0]["pieces"] > 1 else got[0], sum(local)))
    return _measured(pairs)


def _added_up(window: Window) -> bool:
    """Whether the script reduces what each backward computes and adds it up itself."""
    reduced = [one for _, fact in window for one in fact.get("reduced", {}).values()]
    return any(one["times"] > 1 and one["whole"] for one in reduced)


def _measured(pairs: list[tuple[float, float]]) -> tuple[float | None, float]:
    """The factor between sums of local gradients and final ones, and what it leaves unexplained.

    None if no factor explains them.
    """
    product = sum(final * local for final, local in pairs)
    square = sum(local * local for _, local in pairs)
    final_square = sum(final * final for final, _ in pairs)
    if not square or not final_square or not math.isfinite(product):
        return None, 0.0
    factor = product / square
    residual = math.sqrt(max(0.0, final_square - product * factor) / final_square)
    return (factor if residual <= FITS else None), residual


def _pairs(window: Window, rescale: float, readers: Groups) -> list[tuple[float, float]]:
    """Per parameter: its final gradient, and the sum of the local ones.

    Only of parameters that all ranks hold, whole or, with fully_shard, in pieces. Whether another
    shard's local gradient contains the loss terms of other ranks depends on how the activations are
    exchanged. If there are only such shards, of all.
    """
    if pieces := _pairs_of_pieces(window, rescale):
        return pieces
    names = _names(window) - set(window.differing_gradients)
    whole = {
        name
        for name in names
        if len(window.groups(name)) == 1 and computed_alike(window, name, readers)
    }
    return [
        (final / rescale, local)
        for name in sorted(whole or names)
        for group in window.groups(name)
        for final, local in local_and_final(window, name, group)
    ]


def computed_alike(window: Window, name: str, readers: Groups) -> bool:
    """Whether ranks that share their data compute the same gradient, and not parts of it."""
    local = {rank: snapshot["local"].get(name) for rank, snapshot in window.snapshots().items()}
    return all(alike([v for rank in group if (v := local.get(rank))]) for group in readers)


def _pairs_of_pieces(window: Window, rescale: float) -> list[tuple[float, float]]:
    """As `_pairs`, of parameters that fully_shard splits: each rank has a local gradient of all."""
    snapshots = window.snapshots()
    pairs = []
    for name, size in next(iter(snapshots.values()), no_snapshot())["pieces"].items():
        groups = window.groups(name)
        finals = [snapshots[group[0]]["grads"].get(name) for group in groups]
        locals_ = [snapshot["local"].get(name) for snapshot in snapshots.values()]
        known = [value for value in (*finals, *locals_) if value is not None]
        if len(groups) == size and len(known) == len(finals) + len(locals_):
            final = sum(value for value in finals if value is not None)
            pairs.append((final / rescale, sum(known) - final))
    return pairs


def _names(window: Window) -> set[str]:
    """The parameters with a gradient."""
    return {name for each in window.snapshots().values() for name in each["grads"]}


def local_and_final(window: Window, name: str, group: list[int]) -> list[tuple[float, float]]:
    """The final gradient of a group's copies, and the sum of their local ones; empty if unknown."""
    snapshots = [window.snapshots().get(rank, no_snapshot()) for rank in group]
    final = snapshots[0]["grads"].get(name)
    seen = [part for s in snapshots if (part := s["local"].get(name)) is not None]
    return [(final, sum(seen))] if final is not None and seen else []


def _of_parts(window: Window, run: Run, factor: float | None) -> float | None:
    """α where ranks hold different parameters, from the factor of their gradients.

    If ranks share their data, a DTensor's local gradient contains the loss terms of one rank. For
    other shards it is unknown whose terms it contains: None.
    """
    replicas = not run.models_differ or any(len(window.groups(n)) == 1 for n in _names(window))
    if factor is None or replicas or len(run.readers) == run.world:
        return factor
    kept = all(fact["dtensors"] for _, fact in window)
    return factor * len(run.readers) / run.world if kept else None


def _by_fsdp(window: Window, readers: int) -> float | None:
    """α as fully_shard's own collectives tell: an average over the ranks of their groups.

    None if they do anything else, or combine the gradients of some parameters over other groups.
    """
    factors = set()
    for _, fact in window:
        calls = fact["fsdp"]
        groups = {(call["op"], tuple(call["group"])) for call in calls}
        if len(groups) != len({op for op, _ in groups}) or not calls:
            return None
        if any(call["reduce"] != "avg" for call in calls):
            return None
        factors.add(math.prod(1 / len(group) for _, group in groups))
    if len(factors) != 1 or not readers:
        return None
    return factors.pop() * readers / window.world


def rescaled(window: Window) -> float:
    """The one factor by which a script scaled all gradients between backward and the update.

    1 if there is none: then `.grad` is what backward left, or the script combined the ranks' in
    between, which looks like a factor if they are equal.
    """
    if any(map(_reduces_gradients, window.ranks.values())):
        return 1.0
    pairs = []
    for _, fact in window:
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
