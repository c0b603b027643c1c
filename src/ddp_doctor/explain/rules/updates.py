"""What a script does between backward and the update: clips, unscales, skips, schedules."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ddp_doctor.explain.combination import rescaled
from ddp_doctor.explain.findings import Finding, finding, rule
from ddp_doctor.explain.numbers import alike, near, number
from ddp_doctor.explain.steps import Step
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import ClipFact, ScheduleFact, WindowFact


@rule("clipped_local_shards")
def clipped_local_shards(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Between backward and the update, each rank has scaled its own shards by another factor.

    Right if the norm is that of all shards, as clip_grad_norm_ finds it for DTensors: the factors
    are equal then.
    """
    for window in run.complete if run.world > 1 else ():
        factors = [rescaled([fact]) for fact in window.facts]
        if window.sharded and not alike(factors, 1e-3):
            yield finding(
                "clipped_local_shards",
                f"Step {window.n}: the parameters are sharded, and between backward and the update "
                f"each rank has scaled its shards by a factor of its own "
                f"({', '.join(map(number, factors[:8]))}).",
                window.first["step_place"],
                "torch.nn.utils.clip_grad_norm_(model.parameters(), limit) with the DTensors, or "
                "model.clip_grad_norm_(limit) with FullyShardedDataParallel.",
            )
            return


@rule("clipped_before_sync")
def clipped_before_sync(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Gradients are clipped by value, or by norms that differ on the ranks, and combined later.

    Right if the norms are equal on all ranks. A note if they are below the limit.
    """
    for window in run.complete if run.world > 1 and not run.split else ():
        clips = [fact["clips"] for fact in window.facts if not window.sharded]
        for ones in zip(*clips, strict=True) if len(set(map(len, clips))) == 1 else ():
            norms = [clip["norm"] or 0.0 for clip in ones]
            by_value = ones[0]["kind"] == "value"
            own = by_value or not alike(norms, 1e-5)
            if own and any(_combines_later(fact, ones[0]) for fact in window.facts):
                shown = f"by their norms, {', '.join(map(number, norms[:8]))}"
                yield finding(
                    "clipped_before_sync",
                    f"Step {window.n}: the ranks clip gradients {'by value' if by_value else shown}"
                    f", and an all-reduce follows in the same step. The mean of clipped gradients "
                    f"is not the clipped mean.",
                    ones[0]["place"],
                    "Clip after the all-reduce, right before optimizer.step().",
                    None if any(map(shortens, ones)) else "note",
                )
                return


def shortens(clip: ClipFact) -> bool:
    """Whether a clip has changed gradients, as far as is known of one by value."""
    return clip["kind"] == "value" or (clip["norm"] or 0.0) > (clip["limit"] or math.inf)


def _combines_later(fact: WindowFact, clip: ClipFact) -> bool:
    """Whether an all-reduce of something like gradients follows a clip in the same step.

    Of a clip by value no norm tells that the ranks' gradients still differ.
    """
    kinds = {"gradient", "flat", "like a gradient"} | (
        {"other"} if clip["kind"] == "norm" else set()
    )
    return any(
        call["op"] == "all_reduce" and call.get("what") in kinds and call.get("numel", 0) > 1
        for call in fact["collectives"][clip["collectives"] :]
    )


@rule("rank_skipped_step")
def rank_skipped_step(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Ranks that ended normally took different numbers of optimizer steps.

    Right under Join, which shadows the missing steps' collectives, if that is meant: the replicas
    are equal then. Right if one rank steps and broadcasts its parameters.
    """
    totals = [rank.totals["steps"] for rank in run.ranks if rank.error is None and rank.totals]
    if len(totals) < max(2, run.world) or any(rank.facts["join"] for rank in run.ranks):
        return
    common = set.intersection(*map(set, totals))
    counts = [sum(total[index] for index in common) for total in totals]
    skipped = [w for w in run.windows if w.complete and len({f["skipped"] for f in w.facts}) > 1]
    sends = any(
        call["op"] == "broadcast" and call.get("what") == "parameter"
        for window in run.windows
        for fact in window.facts
        for call in fact["collectives"]
    )
    if sends or not (skipped or len(set(counts)) > 1):
        return
    evidence = f"Optimizer steps taken, by rank: {', '.join(map(str, counts[:8]))}."
    if skipped:
        ranks = ", ".join(str(rank) for rank, fact in skipped[0] if fact["skipped"])
        evidence = f"Step {skipped[0].n}: rank {ranks} skipped the update, others did not."
    yield finding(
        "rank_skipped_step",
        evidence,
        run.windows[0].first["step_place"] if run.windows else "",
        "Decide about skipping on all ranks together: all-reduce the flag "
        "(op=dist.ReduceOp.MAX) before the if.",
    )


@rule("scaler_scales_differ")
def scaler_scales_differ(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """The gradient scalers of the ranks have different scales in one step.

    Right if all ranks see the same infinities, as they do after an average: the scales are equal.
    """
    if run.differing_scales is None:
        return
    step, scales = run.differing_scales
    listed = ", ".join(f"rank {r}: {number(s)}" for r, s in list(scales.items())[:8])
    yield finding(
        "scaler_scales_differ",
        f"After step {step} the loss scales are {listed}.",
        run.ranks[0].facts["scale"][-1]["place"],
        "Unscale gradients that are already averaged, or all-reduce found_inf "
        "(torch.distributed.fsdp.sharded_grad_scaler does).",
    )


@rule("scheduler_steps_per_rank")
def scheduler_steps_per_rank(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """The scheduler steps W times per optimizer step, and its schedule ends early.

    Right if the schedule was computed for W times as many steps: the rate is then still changing
    when the run ends. Accelerate's prepared scheduler is made for that. Another mistake if a
    backward comes between: one call per micro-batch, and as many micro-batches as ranks.
    """
    by_scheduler: dict[int, list[ScheduleFact]] = {}
    for fact in run.ranks[0].facts["schedule"] if run.world > 1 else ():
        by_scheduler.setdefault(fact["scheduler"], []).append(fact)
    for history in by_scheduler.values():
        last = history[-1]
        count, taken, total = last["count"], last["steps"], last["total"]
        together = Counter(fact["backwards"] for fact in history[: 40 * run.world])
        often = together.most_common(1)[0][1]
        if taken < 3 or not near(count, taken * run.world, 0.12) or often < run.world:
            continue
        rates = [fact["rate"] or 0.0 for fact in history]
        counts = [0, *(fact["count"] for fact in history)]
        ended = sum(
            now - before
            for (before, now), rate in zip(pairwise(counts), rates, strict=True)
            if rate <= 1e-6 * max(rates)
        )
        over = total is not None and count > total
        if over or ended > 0.25 * count:
            how = f"its schedule has {total}" if over else f"its rate was 0 {ended} times"
            yield finding(
                "scheduler_steps_per_rank",
                f"The scheduler stepped {count} times in {taken} optimizer steps of {run.world} "
                f"ranks, and {how}.",
                last["place"],
                "Do not pass the scheduler to prepare(), or give it world_size times as many steps "
                "(accelerate: split_batches, step_scheduler_with_optimizer).",
            )
            return
