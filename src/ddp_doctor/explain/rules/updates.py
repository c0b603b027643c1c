"""What a script does between backward and the update: clears, clips, unscales, skips, schedules."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

from ddp_doctor.explain.combination import rescaled, untouched
from ddp_doctor.explain.findings import Finding, finding, rule
from ddp_doctor.explain.numbers import alike, near, number
from ddp_doctor.explain.steps import Step, by_optimizer
from ddp_doctor.facts.merged import Run, Window, so_far
from ddp_doctor.facts.types import ClipFact, ScheduleFact, WindowFact


@rule("micro_batches_discarded")
def micro_batches_discarded(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """zero_grad runs between the micro-batches of one step, so all but the last ones are lost.

    Right if the lost backwards are not micro-batches: another call made them (an attack on the
    inputs), they see the same data (SAM), or the script keeps their gradients somewhere and writes
    the result into `.grad`. Right if it is rare: a batch with a NaN is skipped.
    """
    kinds = {(one.window.n, one.window.optimizer): one.combination.kind for one in steps}

    def lost(window: Window, fact: WindowFact) -> int:
        measured = kinds.get((window.n, window.optimizer)) in ("averaged", "summed", "scaled")
        return _lost(window, fact) if measured or untouched(fact) else 0

    for windows in by_optimizer(run.complete).values():
        for window, rank, fact, count, often in _usual(windows, lost):
            yield finding(
                "micro_batches_discarded",
                f"Step {window.n}, rank {rank}: {count + len(fact['backwards'])} micro-batches ran "
                f"backward, and zero_grad() cleared the gradients of {count} of them before the "
                f"optimizer stepped. {often}",
                fact["backwards"][-1]["place"],
                "Call optimizer.zero_grad() once per step: right after optimizer.step(), or before "
                "the first micro-batch.",
            )


def _usual(
    windows: list[Window], count: Callable[[Window, WindowFact], int]
) -> Iterator[tuple[Window, int, WindowFact, int, str]]:
    """The first window and rank for which there is something to count, if most windows have one."""
    found = [
        (window, rank, fact, counted)
        for window in windows
        for rank, fact in window
        if (counted := count(window, fact))
    ]
    seen = len({window.n for window, *_ in found})
    if seen > 1 and 2 * seen > len(windows):
        yield *found[0], f"Seen in {seen} of {len(windows)} observed steps."


def _lost(window: Window, fact: WindowFact) -> int:
    """How many micro-batches of this window zero_grad has cleared."""
    if not fact["backwards"]:
        return 0
    last = fact["backwards"][-1]
    lost = [
        one
        for one in fact["dropped"]
        if one["optimizer"] == window.optimizer and one["call"] == last.get("call")
    ]
    inputs = [str(group) for group in fact["inputs"] if group]
    if len(inputs) > 1:
        return len(lost) if len(set(inputs)) == len(inputs) else 0
    targets = [term["target"] for term in last.get("terms", ()) if "target" in term]
    return len(lost) if all(one["targets"] and one["targets"] != targets for one in lost) else 0


@rule("gradients_not_cleared")
def gradients_not_cleared(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Backward adds to the very gradients that the step before has used: nothing cleared them.

    Right if a script does so on purpose, and then it changes them in between (a decay, what a
    compression left over): only gradients that are the same as right after the step count.
    """

    def kept(window: Window, fact: WindowFact) -> int:
        return 0 if "stepped_in_backward" in fact else window.leftover(fact)

    for windows in by_optimizer(run.complete).values():
        later = [window for window in windows[1:] if window.backwards]
        for window, rank, fact, count, often in _usual(later, kept):
            yield finding(
                "gradients_not_cleared",
                f"Step {window.n}, rank {rank}: when backward began, {count} parameters still held "
                f"the previous step's gradient, and backward added to it. {often}",
                fact["backwards"][0]["place"],
                "optimizer.zero_grad() in every step: before the first backward, or right after "
                "optimizer.step().",
            )


@rule("clipped_before_sync", "clipped_local_shards")
def clipped_by_own_norms(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """The ranks' norms at a clip differ: gradients are clipped before they are combined, or each
    rank has clipped its own shards.

    Right if the norms are equal on all ranks: the gradients were combined before, or the norm is
    that of all shards, as clip_grad_norm_ finds it for DTensors.
    """
    for window in run.complete if run.world > 1 else ():
        factors = [rescaled([fact]) for fact in window.facts]
        if window.sharded and not alike(factors, 1e-3):
            shown = "each rank has scaled its shards by a factor of its own"
            yield _local_shards(window, shown, factors, window.first["step_place"])
        clips = [fact["clips"] for fact in window.facts]
        for ones in zip(*clips, strict=True) if len(set(map(len, clips))) == 1 else ():
            norms = [clip["norm"] for clip in ones if clip["norm"] is not None]
            by_value = ones[0]["kind"] == "value"
            if not by_value and (len(norms) < len(ones) or alike(norms, 1e-5)):
                continue
            if window.sharded or run.split:
                if not by_value and not ones[0]["sharded"]:
                    shown = "the norms at the clip are each rank's own"
                    yield _local_shards(window, shown, norms, ones[0]["place"])
            elif any(_combines_later(fact, ones[0]) for fact in window.facts):
                shown = f"by their norms, {', '.join(map(number, norms[:8]))}"
                yield finding(
                    "clipped_before_sync",
                    f"Step {window.n}: the ranks clip gradients {'by value' if by_value else shown}"
                    f", and an all-reduce follows in the same step. The mean of clipped gradients "
                    f"is not the clipped mean.",
                    ones[0]["place"],
                    "Clip after the all-reduce, right before optimizer.step().",
                    None if by_value or any(map(_bites, ones)) else "note",
                )


def _local_shards(window: Window, what: str, numbers: list[float], place: str) -> Finding:
    return finding(
        "clipped_local_shards",
        f"Step {window.n}: the parameters are sharded, and between backward and the update {what} "
        f"({', '.join(map(number, numbers[:8]))}).",
        place,
        "torch.nn.utils.clip_grad_norm_(model.parameters(), limit) with the DTensors, or "
        "model.clip_grad_norm_(limit) with FullyShardedDataParallel.",
    )


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


def _bites(clip: ClipFact) -> bool:
    return (clip["norm"] or 0) > (math.inf if clip["limit"] is None else clip["limit"])


@rule("clipped_per_micro_batch", "clipped_before_unscale")
def clipped_too_early(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """A clip cuts gradients after a micro-batch that is not the last one, or while they still carry
    the GradScaler's factor.

    Right if the limit is never reached before the last micro-batch. Right if scaler.unscale_ or a
    division comes first: the gradients are then not what backward left. Right if the limit is
    multiplied by the scale.
    """
    for window in run.complete:
        for rank, fact in window:
            for clip in filter(_bites, fact["clips"]):
                norm, limit = number(clip["norm"] or 0), clip["limit"] or 0
                at, micros = f"Step {window.n}, rank {rank}:", len(fact["backwards"])
                if clip["kind"] == "norm" and 0 < so_far(clip, window) < micros:
                    yield finding(
                        "clipped_per_micro_batch",
                        f"{at} after {so_far(clip, window)} of {micros} micro-batches, a clip cut "
                        f"the norm from {norm} to {number(limit)}.",
                        clip["place"],
                        "Clip once per step: after the last micro-batch, before optimizer.step().",
                    )
                if 1 != clip["scale"] > limit and untouched(fact):
                    yield finding(
                        "clipped_before_unscale",
                        f"{at} the norm {norm} at the clip carries the loss scale "
                        f"{number(clip['scale'])}; the limit {number(limit)} does not.",
                        clip["place"],
                        "scaler.unscale_(optimizer) before the clip.",
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
