"""What a plain run has measured, a line each; and what it has not.

Each line says what was compared, and holds for the observed steps. A line that would need something
that was not seen says so, and its subject is among what was not measured.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from ddp_doctor.explain.combination import rescaled
from ddp_doctor.explain.numbers import alike, number
from ddp_doctor.explain.rules.combining import synchronized
from ddp_doctor.explain.rules.updates import shortens
from ddp_doctor.explain.steps import Step
from ddp_doctor.facts.merged import Run, Window

DIVISION = "whether each rank's loss is divided by the right number"


@dataclass(frozen=True)
class Line:
    """A measured property: which, and what was found. `values` are its numbers, for JSON."""

    name: str
    text: str
    values: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Observed:
    """The lines, and what was not measured."""

    lines: list[Line]
    unmeasured: list[str]


def observed(run: Run, steps: list[Step]) -> Observed:
    """All that the journals of a run show without a guess."""
    if not run.complete:
        return Observed([], [])
    lines = [
        _gradients(run, steps),
        *_micro_batches(run),
        *_replicas(run),
        *_settings(run),
        *_data(run),
        *_random(run),
        _finite(run),
    ]
    unmeasured = [f"{line.name}: {line.text}" for line in lines if line.values.get("unmeasured")]
    return Observed([line for line in lines if not line.values.get("unmeasured")], unmeasured)


def _gradients(run: Run, steps: list[Step]) -> Line:
    """P0 in the most common kind of step."""
    if not steps:
        return _in_step(run)
    kind, seen = Counter(step.combination.kind for step in steps).most_common(1)[0]
    step = next(step for step in steps if step.combination.kind == kind)
    text = _of_kind(step)
    of_kind = [s.combination.factor or 0.0 for s in steps if s.combination.kind == kind]
    if not alike(of_kind):
        text += f" ({number(min(of_kind))} to {number(max(of_kind))} in the observed steps)"
    own = sorted({name for s in steps for name in s.window.differing_gradients})
    if own and kind not in ("not combined", "in parts"):
        text += f"; of {len(own)} others, first {own[0]}, each rank has its own"
    if run.split and kind != "in parts":
        text += "; those that only some ranks step were not compared"
    factors = [rescaled(s.window.facts) for s in steps if s.combination.kind == kind]
    if kind in ("averaged", "summed") and not alike(factors, 1e-3):
        text += "; then scaled by another factor in each step, as a clip does"
    elif any(map(shortens, (clip for s in steps for f in s.window.facts for clip in f["clips"]))):
        text += "; the script clips them"
    if run.differing_scales:
        text += "; then each rank divides by its own loss scale"
    if missing := sorted(unused(run.complete)):
        text += f"; {_many(len(missing), 'trained parameter')} without one, first {missing[0]}"
    if seen < len(steps):
        text += f" ({seen} of {len(steps)} observed steps)"
    values: dict[str, object] = {"combination": kind, "factor": step.combination.factor}
    if kind in ("in parts", "in backward", "unknown"):
        values["unmeasured"] = True
    return Line("gradients", text, values)


def _of_kind(step: Step) -> str:
    world, found = step.window.world, step.combination
    factor = number(found.factor or 0.0)
    alone = "" if alike([found.factor or 1.0, 1.0]) else f", scaled by {factor}"
    return {
        "averaged": f"the average of what the {world} ranks computed",
        "summed": f"the sum of what the {world} ranks computed, and not their average",
        "scaled": f"the sum of what the {world} ranks computed, times {factor}; an average has "
        f"{number(1 / world)}",
        "not combined": "each rank steps with its own: none is equal on the ranks",
        "in parts": "the ranks step parts of a model, or models of their own: not compared",
        "in backward": f"the all-reduce at {found.place} runs inside of backward, before the "
        "doctor sees what each rank has computed",
        "unknown": "how the ranks are combined was not seen",
        "no multiple": "no multiple of the sum of what the ranks' backwards computed",
        "alone": f"what the one process computed{alone}",
    }[found.kind]


def _in_step(run: Run) -> Line:
    """Without gradients: an optimizer may combine the ranks inside of its step."""
    inside = [fact for each in run.complete for fact in each.facts if "combined_in_step" in fact]
    if not inside:
        return Line("gradients", "no parameter of an optimizer has one in any observed step")
    at = inside[0]["combined_in_step"]
    text = f"the optimizer combines the ranks inside of its step, at {at}"
    return Line("gradients", text, {"combination": "in step", "unmeasured": True})


def _micro_batches(run: Run) -> list[Line]:
    """How many backwards a step has, in which a wrapper averages, and what zero_grad clears."""
    steps = [window.facts for window in run.complete if window.trains]
    facts = [fact for of_ranks in steps for fact in of_ranks]
    counts = sorted({len(fact["backwards"]) for fact in facts})
    cleared = [most for of in steps if (most := max(fact["cleared"] for fact in of))]
    kept = [most for of in steps if (most := max(fact["leftover"] for fact in of))]
    if not facts or not (counts[-1] > 1 or cleared or kept):
        return []
    shown = number(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    text = f"{shown} backward{'s' * (shown != '1')} per optimizer step"
    flags = [synchronized(fact) for fact in facts]
    if run.world > 1 and all(flags):
        if all(all(each) for each in flags):
            text += ", each synchronized by the wrapper"
        elif all(each[-1] and not any(each[:-1]) for each in flags):
            text += ", synchronized by the wrapper in the last one"
    of = f"of {len(steps)} observed steps"
    if cleared:
        earlier = _many(max(cleared), "earlier backward")
        text += f"; in {len(cleared)} {of}, zero_grad cleared what {earlier} had left"
    if kept:
        text += f"; in {len(kept)} {of}, the gradients of the step before were still there"
    return [Line("backwards", text, {"backwards": counts, "cleared": cleared, "kept": kept})]


def _replicas(run: Run) -> list[Line]:
    """Parameters and buffers, where ranks have copies."""
    if run.world < 2:
        return []
    if run.in_groups or not run.copies:
        return [Line("replicas", "which ranks hold copies was not seen", {"unmeasured": True})]
    windows, shared = run.complete, [n for n, g in run.copies.items() if len(g) < run.world]
    if not shared:
        return [Line("replicas", "no two ranks step copies of one parameter")]
    drifted = {name for window in windows for name in window.differing_parameters}
    apart = [name for name in shared if name in drifted]
    text = f"{_many(len(shared), 'parameter')} bitwise equal after each observed step"
    if apart:
        first = next(w.n for w in windows if set(apart) & set(w.differing_parameters))
        text = f"{len(apart)} of {len(shared)} parameters differ after step {first}"
    buffers = {name for window in windows for f in window.facts for name in f["after"]["buffers"]}
    differing = {name for window in windows for name in window.differing_buffers}
    if buffers:
        how = f"{len(differing)} differ" if differing else "none differs"
        text += f"; of {_many(len(buffers), 'buffer')} {how}"
    norms = max(window.first["batch_norms"] for window in windows)
    if norms:
        text += f"; {_many(norms, 'BatchNorm layer')} with the statistics of each rank's own batch"
    return [Line("replicas", text, {"differing": apart, "buffers": sorted(differing)})]


def _settings(run: Run) -> list[Line]:
    """Hyperparameters of all ranks, and the scheduler's steps."""
    settings = [
        [(f["n"], f["optimizer"], f["groups"]) for f in rank.facts["settings"]]
        for rank in run.ranks
    ]
    said = []
    if len(settings) == run.world > 1 and settings[0]:
        same = all(each == settings[0] for each in settings)
        said.append(f"hyperparameters {'are equal' if same else 'differ'} between the ranks")
    history = run.ranks[0].facts["schedule"]
    last = {fact["scheduler"]: fact for fact in history}
    said += [
        f"a scheduler stepped {one['count']} times in {one['steps']} optimizer steps"
        for one in last.values()
    ]
    return [Line("settings", "; ".join(said))] if said else []


def _data(run: Run) -> list[Line]:
    """Whether the ranks' batches differ, and whether the order of an epoch repeats."""
    said = []
    if run.world > 1:
        if not run.data:
            return [Line("data", "whether the ranks' batches differ", {"unmeasured": True})]
        equal = [len(set(of)) < len(of) for of in run.data]
        how = "are equal on some ranks" if all(equal) else "differ"
        steps = f"in {len(equal) - sum(equal)} of {len(equal)} observed steps"
        steps = steps if any(equal) and not all(equal) else "in each observed step"
        said.append(f"the batches of the {run.world} ranks {how} {steps}")
    epochs = [fact for fact in run.ranks[0].facts["sampler"] if fact["shuffle"] and fact["grad"]]
    orders = {(fact["seed"], fact["epoch"]) for fact in epochs}
    if len(epochs) > 1:
        said.append(f"{len(epochs)} epochs began, with {len(orders)} different orders")
    return [Line("data", "; ".join(said))] if said else []


def _random(run: Run) -> list[Line]:
    """Whether the generators of the ranks are in one state, if a step draws anything."""
    windows = [window for window in run.complete if window.trains]
    states = [[fact["random"] for fact in window.facts] for window in windows]
    if run.world < 2 or not states or not all(all(each) for each in states):
        return []
    dropout = all(fact["dropout"] for window in windows for fact in window.facts)
    firsts = [each[0][0] for each in states]
    if not dropout and len(set(firsts)) < len(firsts):
        return []
    same = [all(one == each[0] for one in each) for each in states]
    if not any(same):
        return [Line("random", "the ranks' generators are in different states")]
    if not all(same):
        return []
    masks = ": their dropout draws the same numbers" if dropout else ""
    return [Line("random", f"all ranks' generators are in the same state{masks}")]


def _finite(run: Run) -> Line:
    """NaN and infinity in losses and gradients."""
    for window in run.complete:
        for rank, fact in window:
            losses = [
                value for backward in fact["backwards"] for value in backward.get("values", [])
            ]
            grads = [value for of in fact["snapshot"]["grads"].values() for value in of or ()]
            for what, values in (("loss", losses), ("gradient", grads)):
                bad = [value for value in values if not math.isfinite(value)]
                if bad:
                    text = f"step {window.n}, rank {rank}: a {what} is {number(bad[0])}"
                    return Line("numbers", text, {"finite": False})
    text = "no NaN or infinity in the losses and gradients that were looked at"
    return Line("numbers", text, {"finite": True})


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def unused(windows: list[Window]) -> set[str]:
    """Trained parameters without a gradient in any observed step."""
    missing = [set(fact["snapshot"]["missing"]) for window in windows for fact in window.facts]
    return missing[0].intersection(*missing) if missing else set()
