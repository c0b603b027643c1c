"""Groups of ranks: each gradient is combined over the copies of its parameter, each term once."""

import math
from collections.abc import Iterator
from dataclasses import replace

from ddp_doctor.explain.combination import computed_alike, local_and_final
from ddp_doctor.explain.equation import Equation
from ddp_doctor.explain.findings import GROUPS, Finding, finding
from ddp_doctor.explain.numbers import alike, near, number
from ddp_doctor.facts.merged import Run, Window

NORM = (
    "Add up the squares of each shard once, and those of one copy of each whole parameter. "
    "torch.nn.utils.clip_grad_norm_ does so with DTensors."
)
SUM = (
    "Divide the loss by all items once, sum each gradient over the ranks with a copy of its "
    "parameter, and count each loss term once."
)


def wrong_group(run: Run, equation: Equation) -> Iterator[Finding]:
    """Where ranks hold parts of a model, gradients are off by the size of a group.

    All of them: the weights of all items do not add up to 1. Some: the same sum of local gradients
    arrives with another factor. Right if the loss is a sum that nobody divides, and if the factor
    is a number in the code.
    """
    smaller = any(
        "group" in call and call.get("what") == "gradient"
        for window in run.complete
        for _, fact in window
        for call in fact["collectives"]
    )
    if run.in_groups or not (run.split or smaller):
        return
    others = list(other_factors(run))
    yield from others
    for step in () if others else equation.steps:
        measured = step.combination.kind in ("averaged", "summed", "scaled")
        undivided = step.reduction == "sum" and all(e.share > 0.99 * e.count for e in step.entries)
        if not measured or undivided or step.total <= 0 or step.micros > 1:
            continue
        if near(step.total, 1.0) or near(step.total, step.coefficient):
            continue
        yield _titled(
            "own_reduction_sums" if step.total > 1 else "missing_world_size_factor",
            f"Step {step.window.n}: all weights together are {number(step.total)}, not 1: every "
            f"gradient is {number(step.total)} times what it should be.",
            step.place,
            SUM,
        )
        return


def other_factors(run: Run) -> Iterator[Finding]:
    """Parameters of which the local gradients are combined with different factors.

    Ranks that share their data compute each term of a whole parameter once each. The same for a
    shard, unless no exchange in backward adds up the ranks' terms, as with DTensors.
    """
    found: dict[str, list[float]] = {}
    windows = [window for window in run.complete if not window.differing_gradients]
    for window in windows:
        for name, factor in _factors(window).items():
            found.setdefault(name, []).append(factor)
    sure = {
        name: factors[0]
        for name, factors in found.items()
        if len(factors) > 1 and alike([f / factors[0] for f in factors], 0.02)
    }
    sharers = run.world / len(run.readers)
    copies = {name for name in sure if len(run.copies.get(name, [[]])) == 1}
    whole = {name: sure[name] * _alike_on(run, windows, name) for name in copies}
    kept = any(rank.start["shards"] for rank in run.ranks if rank.start)
    for terms in (1.0,) if kept else (1.0, sharers):
        factors = {name: whole.get(name, f * terms) for name, f in sure.items()}
        if alike(list(factors.values())):
            return
    kinds: dict[str, list[str]] = {}
    for name, factor in factors.items():
        kinds.setdefault(number(float(f"{factor:.3g}")), []).append(name)
    listed = "; ".join(
        f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: × {factor}"
        for factor, names in sorted(kinds.items(), key=lambda kind: len(kind[1]))[:4]
    )
    yield _titled(
        "own_reduction_sums",
        f"In {len(windows)} observed steps, the sum of the local gradients is multiplied by "
        f"another number for some parameters: {listed}.",
        windows[0].ranks[0]["step_place"],
        SUM,
    )


def _alike_on(run: Run, windows: list[Window], name: str) -> float:
    """How many ranks compute each part of a gradient: all of it, if they all compute the same."""
    for groups in ([list(range(run.world))], run.readers):
        if all(computed_alike(window, name, groups) for window in windows):
            return run.world / len(groups)
    return 1.0


def _factors(window: Window) -> dict[str, float]:
    """For each parameter: its final gradient divided by the sum of the local ones."""
    found = {}
    names = {name for s in window.snapshots().values() for name in s["grads"]}
    for name in sorted(names):
        pairs = [
            pair for group in window.groups(name) for pair in local_and_final(window, name, group)
        ]
        square = sum(local * local for _, local in pairs)
        factor = sum(final * local for final, local in pairs) / square if square else math.nan
        fits = all(abs(final - factor * local) <= 0.02 * abs(final) for final, local in pairs)
        if math.isfinite(factor) and factor and fits:
            found[name] = factor
    return found


def norm_of_copies(run: Run, equation: Equation) -> Iterator[Finding]:
    """A clip divides by a norm that counts parameters once per copy.

    The clipped norm is the limit in every step; so the one that the script computed is known.
    Right if every parameter has equally many copies: then the limit is another one in effect.
    """
    if run.world < 2 or not run.split:
        return
    seen = []
    for window in run.complete:
        factors = [fact.get("rescaled") for _, fact in window]
        squares = [fact.get("squares", {}) for _, fact in window]
        if None not in factors and alike([float(f or 0) for f in factors], 1e-3):
            once = sum(
                squares[group[0]].get(name, 0.0)
                for name in squares[0]
                for group in window.groups(name)
            )
            each = [sum(of_rank.values()) for of_rank in squares]
            seen.append((window, float(factors[0] or 0), once, sum(each)))
    largest = max((factor for _, factor, _, _ in seen), default=0.0)  # where nothing is cut
    seen = [case for case in seen if case[1] < 0.99 * largest]
    if len(seen) < 3 or alike([factor for _, factor, _, _ in seen], 0.01):
        return
    right = alike([factor * math.sqrt(once) for _, factor, once, _ in seen], 1e-3)
    counted = alike([factor * math.sqrt(copies) for _, factor, _, copies in seen], 1e-3)
    if right or not counted:
        return
    window, _, once, copies = seen[0]
    off = math.sqrt(copies / once / len(run.readers))
    counted_twice = finding(
        "clipped_local_shards",
        f"Step {window.n}: the factor of the clip fits a norm that counts every copy of a "
        f"parameter. It is {number(off)} times the norm of the whole gradient.",
        window.ranks[0]["step_place"],
        NORM,
    )
    yield replace(counted_twice, title="The norm for clipping counts copies", page=GROUPS)


def _titled(code: str, evidence: str, where: str, fix: str) -> Finding:
    title = "A gradient is combined over the wrong ranks, or a term is counted wrongly"
    return replace(finding(code, evidence, where, fix), title=title, page=GROUPS)


RULES = (wrong_group, norm_of_copies)
