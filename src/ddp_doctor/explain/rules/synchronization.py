"""Synchronization: which micro-batch is averaged, and what happens before and after."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ddp_doctor.explain.combination import untouched
from ddp_doctor.explain.equation import Equation
from ddp_doctor.explain.findings import Finding, finding
from ddp_doctor.explain.numbers import alike, near, number
from ddp_doctor.facts.merged import Run, Window, so_far
from ddp_doctor.facts.types import ClipFact, ScheduleFact, StepFact, WindowFact

CLIP_SHARDS = (
    "torch.nn.utils.clip_grad_norm_(model.parameters(), limit) with the DTensors, or "
    "model.clip_grad_norm_(limit) with FullyShardedDataParallel."
)


def last_micro_batch_unsynced(run: Run, equation: Equation) -> Iterator[Finding]:
    """The last backward of a window ran under no_sync, so the optimizer saw local gradients.

    Right if something else combines the gradients: they are equal then. Right for local SGD, which
    averages the parameters.
    """
    if run.world < 2 or run.averages_parameters:
        return
    yield from _last_not_reduced_by_fsdp(run)
    for window in run.complete:
        if not window.differing_gradients:
            continue
        for rank, fact in window:
            flags = _flags(fact)
            if flags and flags[-1] is False:
                shown = "".join("S" if flag else "-" for flag in flags)
                yield finding(
                    "last_micro_batch_unsynced",
                    f"Step {window.n}, rank {rank}: {len(flags)} micro-batches, {shown} "
                    f"(S: synchronized, -: under no_sync). The last one is not synchronized: "
                    f"{len(window.differing_gradients)} gradients differ between the ranks when "
                    f"the optimizer steps.",
                    fact["forwards"][-1]["place"] if fact["forwards"] else "",
                    "Leave no_sync() for the last micro-batch: "
                    "with model.no_sync() if k < K - 1 else nullcontext().",
                )
                return


def _last_not_reduced_by_fsdp(run: Run) -> Iterator[Finding]:
    """fully_shard combined gradients in earlier micro-batches of a step, and not in the last."""
    for window in run.complete:
        for rank, fact in window:
            for op in sorted({call["op"] for call in fact["fsdp"]}):  # all-reduces of replicas, too
                last = max(so_far(call, window) for call in fact["fsdp"] if call["op"] == op)
                if last >= len(fact["backwards"]) - 1:
                    continue
                flag = "all_reduce" if op == "all_reduce" else "gradient_sync"
                yield finding(
                    "last_micro_batch_unsynced",
                    f"Step {window.n}, rank {rank}: {len(fact['backwards'])} micro-batches, and "
                    f"the last {op} is in backward {last + 1}. The optimizer does not get the "
                    f"gradients of later ones: they wait for the next step's.",
                    fact["backwards"][-1]["place"],
                    f"model.set_requires_{flag}(True) before the last micro-batch's forward.",
                )
                return


def other_than_average(run: Run, equation: Equation) -> Iterator[Finding]:
    """What an optimizer gets is no multiple of the sum of all that the ranks' backwards computed.

    Measured for parameters of fully_shard, and where the script reduces a gradient more often than
    once per step. Right if the script, a hook, or a compression changes gradients on purpose: what
    backward leaves is then not what the optimizer gets, or was reduced once.
    """
    found = []
    for step in equation.steps:
        if step.combination.kind != "unknown" or step.combination.residual <= 0.05:
            continue
        for rank, fact in step.window:
            again = _reduced_again(fact)
            seen = fact["snapshot"]["pieces"] and untouched(fact)
            if again is not None or seen or fact.get("handed"):
                found.append((step, rank, fact, again))
                break
    if not found or 2 * len(found) < len(equation.steps):
        return
    step, rank, fact, again = found[0]
    often = f"{again[1]} is all-reduced {again[2]} times in this step. " if again else ""
    yield finding(
        "other_than_average",
        f"Step {step.window.n}: {often}Of the gradients that the optimizer gets, "
        f"{step.combination.residual:.0%} is no multiple of the sum of what the "
        f"{step.world} ranks' {step.micros * step.world} backwards computed. Seen in "
        f"{len(found)} of {len(equation.steps)} observed steps.",
        again[0] if again else fact["step_place"],
        "Reduce each gradient once per step, after the last micro-batch's backward.",
    )


def _reduced_again(fact: WindowFact) -> tuple[str, str, int] | None:
    """A gradient that the script all-reduces after several backwards: where, which, how often."""
    calls = [
        call
        for call in fact["collectives"]
        if call["op"] == "all_reduce" and call.get("what") == "gradient"
    ]
    counts = Counter(call.get("name", "") for call in calls)
    moments = {str(call["backwards"]) for call in calls}
    name, count = counts.most_common(1)[0] if calls else ("", 0)
    return (calls[0]["place"], name, count) if count > 1 and len(moments) > 1 else None


def every_micro_batch_synced(run: Run, equation: Equation) -> Iterator[Finding]:
    """Every micro-batch of a window is averaged, where one average per step would do.

    Right in numbers, so a note: it costs K - 1 all-reduces per step.
    """
    if run.world < 2:
        return
    windows = [window for window in run.complete if window.backwards > 1]
    for window in windows:
        flags = [_flags(fact) for _, fact in window]
        places = {b["place"] for _, fact in window for b in fact["backwards"]}
        calls = {b.get("call") for _, fact in window for b in fact["backwards"]}
        one_loop = len(places) == len(calls) == 1  # and not several losses
        if all(len(flag) > 1 and all(flag) for flag in flags) and one_loop:
            yield finding(
                "every_micro_batch_synced",
                f"Step {window.n}: all {len(flags[0])} micro-batches are averaged over the ranks; "
                f"the last one would be enough.",
                places.pop(),
                "with model.no_sync(): around forward and backward of all but the last one.",
            )
            return


def no_sync_without_forward(run: Run, equation: Equation) -> Iterator[Finding]:
    """A backward runs inside of no_sync, and the forward before it did not.

    The wrapper decides in its forward, so the gradients are averaged all the same. Right in
    numbers if that is meant: a note.
    """
    for window in run.complete if run.world > 1 else ():
        for rank, fact in window:
            for backward in fact["backwards"]:
                if backward.get("no_sync_too_late"):
                    yield finding(
                        "no_sync_without_forward",
                        f"Step {window.n}, rank {rank}: no_sync() is around this backward, and not "
                        f"around the forward before it: the gradients are averaged all the same.",
                        backward["place"],
                        "with model.no_sync(): around forward and backward.",
                    )
                    return


def _flags(fact: WindowFact) -> list[bool]:
    """For each backward that reached a wrapper: whether it was synchronized in the first one."""
    flags = []
    for backward in fact["backwards"]:
        for index, reached in backward.get("wrappers", {}).items():
            if reached and backward["prepared"].get(index) is not None:
                flags.append(bool(backward["prepared"][index]))
                break
    return flags


def rank_skipped_step(run: Run, equation: Equation) -> Iterator[Finding]:
    """Ranks that ended normally took different numbers of optimizer steps.

    Right under Join, which shadows the missing steps' collectives, if that is meant: the replicas
    are equal then. Right if one rank steps and broadcasts its parameters.
    """
    ended = [rank for rank in run.ranks if rank.error is None]
    totals = [rank.totals["steps"] for rank in ended if rank.totals]
    if len(totals) < 2 or len(totals) < run.world:
        return
    common = set.intersection(*map(set, totals))
    counts = {
        rank.rank: sum(total[index] for index in common)
        for rank, total in zip(ended, totals, strict=True)
    }
    skipped = {
        window.n: [rank for rank, fact in window if fact["skipped"]]
        for window in run.windows
        if window.complete and len({fact["skipped"] for fact in window.ranks.values()}) > 1
    }
    if len(set(counts.values())) == 1 and not skipped:
        return
    if any(rank.facts["join"] for rank in run.ranks) or _sends_parameters(run):
        return
    if skipped:
        step, who = next(iter(skipped.items()))
        ranks = ", ".join(map(str, who))
        evidence = f"Step {step}: rank {ranks} skipped the update, others did not."
    else:
        listed = ", ".join(f"rank {rank}: {steps}" for rank, steps in list(counts.items())[:8])
        evidence = f"Optimizer steps taken: {listed}."
    windows = run.windows
    where = windows[0].first["step_place"] if windows else ""
    yield finding(
        "rank_skipped_step",
        evidence,
        where,
        "Decide about skipping on all ranks together: all-reduce the flag "
        "(op=dist.ReduceOp.MAX) before the if.",
    )


def _sends_parameters(run: Run) -> bool:
    """Whether a rank broadcasts its parameters: the others need not step."""
    return any(
        call["op"] == "broadcast" and call.get("what") == "parameter"
        for window in run.windows
        for _, fact in window
        for call in fact["collectives"]
    )


def clipped_before_sync(run: Run, equation: Equation) -> Iterator[Finding]:
    """Gradients are clipped while they are still each rank's own.

    Right if the norms are equal on all ranks: then the gradients were already combined.
    """
    for window in run.complete if run.world > 1 and not run.split else ():
        clips = [] if window.sharded else [fact["clips"] for _, fact in window]
        if len({len(each) for each in clips}) != 1:
            continue
        for ones in zip(*clips, strict=True):  # one clip, on every rank
            if _differ(ones) and any(_combines_later(fact, ones[0]) for _, fact in window):
                yield _clipped_before_sync(window, ones)
                return


def _differ(clips: tuple[ClipFact, ...]) -> bool:
    """Whether the ranks clip gradients of different norms. Of a clip by value there is no norm."""
    norms = [clip["norm"] for clip in clips if clip["norm"] is not None]
    known = len(norms) == len(clips)
    return clips[0]["kind"] == "value" or (known and not alike(norms, 1e-6))


def _combines_later(fact: WindowFact, clip: ClipFact) -> bool:
    """Whether an all-reduce of something like gradients follows a clip in the same step."""
    kinds = ("gradient", "flat", "like a gradient", "other")
    return any(
        call["op"] == "all_reduce" and call.get("what") in kinds and call.get("numel", 0) > 1
        for call in fact["collectives"][clip["collectives"] :]
    )


def _bites(clip: ClipFact) -> bool:
    return (clip["norm"] or 0) > (math.inf if clip["limit"] is None else clip["limit"])


def _clipped_before_sync(window: Window, clips: tuple[ClipFact, ...]) -> Finding:
    bites = clips[0]["kind"] == "value" or any(map(_bites, clips))
    shown = ", ".join("?" if c["norm"] is None else number(c["norm"]) for c in clips[:8])
    return finding(
        "clipped_before_sync",
        f"Step {window.n}: the norms at the clip differ between the ranks ({shown}); the gradients "
        f"are averaged only afterwards. The mean of clipped gradients is not the clipped mean.",
        clips[0]["place"],
        "Clip after the all-reduce, right before optimizer.step().",
        None if bites else "note",
    )


def clipped_per_micro_batch(run: Run, equation: Equation) -> Iterator[Finding]:
    """Clipping runs after every micro-batch, on partial sums.

    Right with one micro-batch per step, and if the limit is never reached before the last one.
    """
    for window in run.complete:
        for rank, fact in window:
            clips = [clip for clip in fact["clips"] if clip["kind"] == "norm"]
            early = [clip for clip in clips if 0 < so_far(clip, window) < len(fact["backwards"])]
            bites = [clip for clip in early if _bites(clip)]
            if bites:
                yield finding(
                    "clipped_per_micro_batch",
                    f"Step {window.n}, rank {rank}: {len(clips)} clips for "
                    f"{len(fact['backwards'])} micro-batches; an early one cut the norm from "
                    f"{number(bites[0]['norm'] or 0)} to {number(bites[0]['limit'] or 0)}.",
                    bites[0]["place"],
                    "Clip once per step: after the last micro-batch, before optimizer.step().",
                )
                return


def clipped_before_unscale(run: Run, equation: Equation) -> Iterator[Finding]:
    """Gradients are clipped while they still carry the GradScaler's factor.

    Right if scaler.unscale_(optimizer) or a division comes first: the gradients are then not what
    backward left. Right if the limit is multiplied by the scale.
    """
    for window in run.complete:
        for rank, fact in window:
            scaled = [clip for clip in fact["clips"] if clip["scale"] != 1 and _bites(clip)]
            if scaled and (scaled[0]["limit"] or 0) < scaled[0]["scale"] and untouched(fact):
                clip = scaled[0]
                yield finding(
                    "clipped_before_unscale",
                    f"Step {window.n}, rank {rank}: the norm {number(clip['norm'] or 0)} at the "
                    f"clip carries the loss scale {number(clip['scale'])}; the limit "
                    f"{number(clip['limit'] or 0)} does not.",
                    clip["place"],
                    "scaler.unscale_(optimizer) before the clip.",
                )
                return


def clipped_local_shards(run: Run, equation: Equation) -> Iterator[Finding]:
    """Parameters are sharded, and the clip saw only this rank's shards.

    Right if clip_grad_norm_ is given the DTensors (its norm is global), or FSDP's own method.
    """
    if run.world < 2:
        return
    for window in run.complete:
        if not window.sharded and not run.split:
            continue
        factors = [fact["rescaled"] for _, fact in window if "rescaled" in fact]
        if len(factors) == run.world and not alike(factors, 1e-3):
            shown = ", ".join(number(factor) for factor in factors[:8])
            clip = next((fact["clips"][-1]["place"] for _, fact in window if fact["clips"]), "")
            yield finding(
                "clipped_local_shards",
                f"Step {window.n}: the parameters are sharded, and between backward and the update "
                f"each rank scaled its shards by a factor of its own ({shown}).",
                clip or window.first["step_place"],
                CLIP_SHARDS,
            )
            return
        clips = [fact["clips"] for _, fact in window]
        if not all(clips):
            continue
        last = [clip[-1] for clip in clips]
        norms = [clip["norm"] for clip in last if clip["norm"] is not None]
        if len(norms) < len(clips) or any(clip["sharded"] for clip in last):
            continue
        if not alike(norms, 1e-5):
            shown = ", ".join(map(number, norms[:8]))
            yield finding(
                "clipped_local_shards",
                f"Step {window.n}: the parameters are sharded, and the norms at the clip are each "
                f"rank's own ({shown}): every shard is scaled by another factor.",
                clips[0][-1]["place"],
                CLIP_SHARDS,
            )
            return


def manual_all_reduce_skips_none(run: Run, equation: Equation) -> Iterator[Finding]:
    """An own loop all-reduces gradients, and ranks disagree about which of them are None.

    Right if the same gradients are None on all ranks: then the loop calls the same collectives.
    """
    if run.world < 2:
        return
    for window in run.windows:
        sent = {
            rank: [
                call.get("name", "")
                for call in fact["collectives"]
                if call["op"] == "all_reduce" and call.get("what") == "gradient"
            ]
            for rank, fact in window
        }
        if not any(sent.values()):
            continue
        missing = [set(snapshot["missing"]) for snapshot in window.snapshots().values()]
        everywhere = missing[0].intersection(*missing)
        disagree = missing[0].union(*missing) - everywhere
        if disagree and len({tuple(call) for call in sent.values()}) > 1:
            yield _skips(window.n, sorted(disagree), sent, _first_gradient_place(window))
            return


def _skips(step: int, names: list[str], sent: dict[int, list[str]], where: str) -> Finding:
    listed = ", ".join(f"rank {rank}: {len(call)}" for rank, call in list(sent.items())[:8])
    return finding(
        "manual_all_reduce_skips_none",
        f"Step {step}: gradients all-reduced by hand: {listed}. {names[0]}"
        + (f" and {len(names) - 1} more have" if len(names) > 1 else " has")
        + " a gradient on some ranks only, so the ranks' all-reduces pair up wrongly.",
        where,
        "if p.grad is None: p.grad = torch.zeros_like(p), and all-reduce every parameter.",
    )


def _first_gradient_place(window: Window) -> str:
    for _, fact in window:
        for call in fact["collectives"]:
            if call.get("what") == "gradient":
                return call["place"]
    return ""


def scaler_scales_differ(run: Run, equation: Equation) -> Iterator[Finding]:
    """The gradient scalers of the ranks have different scales in one step.

    Right if all ranks see the same infinities, as they do after an average: the scales are equal.
    """
    if run.world < 2:
        return
    by_step: dict[int, dict[int, float]] = {}
    places = {}
    for rank in run.ranks:
        for fact in rank.facts["scale"]:
            by_step.setdefault(fact["n"], {})[rank.rank] = fact["scale"]
            places[rank.rank] = fact["place"]
    for step, scales in sorted(by_step.items()):
        if len(scales) == run.world and len(set(scales.values())) > 1:
            listed = ", ".join(f"rank {r}: {number(s)}" for r, s in list(scales.items())[:8])
            yield finding(
                "scaler_scales_differ",
                f"After step {step} the loss scales are {listed}. A rank that saw an infinity "
                f"skipped the step and lowered its scale; the others did not.",
                places[min(places)],
                "Unscale gradients that are already averaged, or all-reduce found_inf "
                "(torch.distributed.fsdp.sharded_grad_scaler does).",
            )
            return


def scheduler_steps_per_rank(run: Run, equation: Equation) -> Iterator[Finding]:
    """The scheduler steps W times per optimizer step, and its schedule ends early.

    Right if the schedule was computed for W times as many steps: the rate is then still changing
    when the run ends. Accelerate's prepared scheduler is made for that. Another mistake if a
    backward comes between: one call per micro-batch, and as many micro-batches as ranks.
    """
    if run.world < 2 or not run.ranks:
        return
    rank = run.ranks[0]
    facts = rank.facts["schedule"]
    by_scheduler: dict[int, list[ScheduleFact]] = {}
    for fact in facts:
        by_scheduler.setdefault(fact["scheduler"], []).append(fact)
    for history in by_scheduler.values():
        last = history[-1]
        count, steps, total = last["count"], last["steps"], last["total"]
        if steps < 3 or not near(count, steps * run.world, 0.12):
            continue
        together = Counter(fact["backwards"] for fact in history[: 40 * run.world])
        if together.most_common(1)[0][1] < run.world:
            continue
        rates = [fact["rate"] or 0.0 for fact in history]
        counts = [0, *(fact["count"] for fact in history)]
        ended = sum(
            now - before
            for (before, now), rate in zip(pairwise(counts), rates, strict=True)
            if rate <= 1e-6 * max(rates)
        )
        if (total is not None and count > total) or ended > 0.25 * count:
            yield finding(
                "scheduler_steps_per_rank",
                f"The scheduler stepped {count} times in {steps} optimizer steps, "
                f"{run.world} times each, and its schedule was over before the run was.",
                last["place"],
                "Do not pass the scheduler to prepare(), or give it world_size times as many steps "
                "(accelerate: split_batches, step_scheduler_with_optimizer).",
            )
            return


def static_graph_with_no_sync(run: Run, equation: Equation) -> Iterator[Finding]:
    """static_graph=True together with no_sync(): the reducer counts the hooks of one pattern only.

    Right if no_sync is never entered, and after a first step without it: the gradients are equal on
    all ranks then, and this is a note.
    """
    static = {wrapper["index"] for wrapper in run.wrappers if wrapper["static_graph"]}
    if not static or run.world < 2:
        return
    seen: list[tuple[int, StepFact, list[str]]] = [
        (window.n, fact, window.differing_gradients if window.complete else [])
        for window in run.windows
        for _, fact in window
    ]
    seen += [(fact["n"], fact, []) for rank in run.ranks for fact in rank.facts["open"]]
    failed = [rank for rank in run.ranks if "ASSERT" in rank.error_text]
    for step, fact, differing in seen:
        for forward in fact["forwards"]:
            if forward["wrapper"] not in static or forward["sync"]:
                continue
            ends = f" {len(differing)} gradients differ between the ranks." if differing else ""
            ends = " Backward failed in the reducer." if failed else ends
            yield finding(
                "static_graph_with_no_sync",
                f"Step {step}: no_sync() around a forward, with static_graph=True.{ends}",
                forward["place"],
                "Leave out static_graph=True, or synchronize every micro-batch.",
                "error" if differing or failed else "note",
            )
            return


RULES = (
    static_graph_with_no_sync,
    last_micro_batch_unsynced,
    other_than_average,
    every_micro_batch_synced,
    no_sync_without_forward,
    rank_skipped_step,
    clipped_before_sync,
    clipped_per_micro_batch,
    clipped_before_unscale,
    clipped_local_shards,
    manual_all_reduce_skips_none,
    scaler_scales_differ,
    scheduler_steps_per_rank,
)
