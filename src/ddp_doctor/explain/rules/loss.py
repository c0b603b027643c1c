"""Counts and factors of a loss. All are hints: each says what a certificate would measure.

What is seen are counts of items, the gradients that arrive at a loss function's output, and the
numbers that the script multiplies or divides by. What the loss is meant to be is not seen.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from ddp_doctor.explain.findings import MICRO_BATCHES, Finding, Prediction, finding, rule
from ddp_doctor.explain.numbers import alike, near, number
from ddp_doctor.explain.rules.pairs import gathers_of
from ddp_doctor.explain.steps import Entry, Step, Term, firsts
from ddp_doctor.facts.merged import Run, so_far
from ddp_doctor.facts.types import CollectiveFact, ScalingFact, uneven

WORLD = re.compile(
    r"world|num_replicas|num_processes|n_?procs?\b|n_?gpus?\b|num_?gpus|n_?ranks|num_ranks|"
    r"num_devices|nproc|replicas|workers|\bsize\b|\bW\b|\bws\b",
    re.IGNORECASE,
)
WITHIN_A_RANK = Prediction("other weights", outside="how a rank's own micro-batches are weighed")


@rule("unequal_denominators", "unequal_denominators_accumulation")
def unequal_denominators(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Means over different numbers of items get the same weight, on the ranks or in micro-batches.

    Right if the counts are equal, or if each rank's sum is divided by a count that all ranks share.
    Right too if a row is one sample, however long it is, and all samples are meant to count alike.
    A smaller last batch of an epoch is a note.
    """
    for code, what in (
        ("unequal_denominators", "ranks"),
        ("unequal_denominators_accumulation", "micro-batches"),
    ):
        found = [
            (max(weights) / min(weights), step, term, parts, by)
            for step in steps
            for term in step.terms
            if term.is_loss or term is step.main
            for parts in (_groups(step, term, what) if run.weighed or what != "ranks" else ())
            for by in [_divided_by(step, parts) if what == "ranks" else []]
            for weights in [_own_weights(term, parts, by)]
            if max(weights) / min(weights) > 1.003
        ]
        if not found:
            continue
        worst = max(found, key=lambda case: case[0])
        compared = [id(step) for step in firsts(steps)]
        early = [case for case in found if id(case[1]) in compared]
        ratio, step, term, parts, by = early[0] if early else worst
        predicts = _shares(parts) if what == "ranks" else WITHIN_A_RANK
        if not early:
            predicts = replace(predicts, outside=predicts.outside or "later steps")
        seen = len({case[1].window.n for case in found})
        counts = ", ".join(number(one.count) for one in parts[:8])
        how = "has the same weight"
        if by:
            how = f"is divided by a number of its own, {', '.join(map(number, by[:8]))}"
        yield finding(
            code,
            f"Step {step.window.n}: the {what}' losses are over {counts} items, and each {how}: "
            f"the items of one count {ratio:.2f} times as much as those of another. Seen in {seen} "
            f"of {len(steps)} observed steps.",
            term.place,
            _global_count(step, term),
            "note" if worst[0] < 1.02 or seen < 0.3 * len(steps) else None,
            predicts,
        )


def _groups(step: Step, term: Term, what: str) -> Iterator[list[Entry]]:
    """The parts to compare: one per rank, or one per micro-batch of a rank."""
    if what == "ranks":
        if step.combination.kind in ("averaged", "summed", "scaled"):
            yield list(term.by(lambda entry: entry.rank).values())
    elif term.micros > 1 and not term.several:
        of_all = term.by(lambda entry: (entry.rank, entry.micro))
        for rank, _ in step.window:
            yield [parts for (of, _), parts in of_all.items() if of == rank]


def _divided_by(step: Step, parts: list[Entry]) -> list[float]:
    """The number by which each rank visibly divides, and no other rank does: its count may include
    more than the loss does, such as the label that a shift drops.
    """
    values = [{o["value"] for o in f["scaling"] if o["op"] == "/"} for f in step.window.facts]
    own = [of - values[0].intersection(*values) for of in values]
    found = [of.pop() for of in own if len(of) == 1]
    return found if len(found) == len(parts) else []


def _own_weights(term: Term, parts: list[Entry], by: list[float]) -> list[float]:
    """Each part's weight of an item, if each is divided by a number of its own; else equal ones.

    Such a number is the count of items, so that all parts have one share; or one of `by`.
    """
    counts = [one.count for one in parts]
    if len(parts) < 2 or min(counts) <= 0 or min(one.share for one in parts) <= 0:
        return [1.0]
    if any(uneven(entry.fact) for entry in term.entries):
        return [1.0]  # items of one call weigh differently by design: another unit than the item
    weights = [one.share / one.count for one in parts]
    own = [weight * count for weight, count in zip(weights, by or counts, strict=True)]
    return weights if alike(own, 0.002) else [1.0]


def _shares(parts: list[Entry]) -> Prediction:
    """One process divides by all items: a rank's share is that of its items."""
    items = sum(one.count for one in parts)
    shares = tuple(one.count / items for one in parts)
    said = ", ".join(f"{share:.3f}" for share in shares[:8])
    return Prediction(f"the ranks' gradients weighed by {said}", shares=shares)


def _global_count(step: Step, term: Term) -> str:
    """A count that is no whole number is a sum of weights, such as those of classes."""
    start = "Use reduction='sum'" if term.reduction == "mean" else "Keep the sum"
    window = " of all micro-batches" if term.micros > 1 else ""
    weighted = any(entry.count != round(entry.count) for entry in term.entries)
    what, total = ("add up the weights of", "weight") if weighted else ("count", "count")
    if step.window.world == 1:
        return f"{start}, {what} the items{window} first, and back-propagate loss_sum / {total}."
    return (
        f"{start}, {what} the items{window} with dist.all_reduce({total}), and back-propagate "
        f"loss_sum * world_size / {total}."
    )


@rule("missing_world_size_factor", "scaled_by_world_size", "own_reduction_sums")
def world_size(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """What is seen of the loss and of the ranks' combination has a factor of the world size W.

    Right if the factors cancel: a sum over the ranks of losses that are divided by the items of
    all; an average of such losses times W. Right if the loss that is meant has the factor.
    """
    for step in firsts(steps) if run.world > 1 and run.weighed else ():
        if step.combination.kind in ("averaged", "summed", "scaled"):
            yield from _of_world_size(step, step.main)


def _of_world_size(step: Step, term: Term | None) -> Iterator[Finding]:
    """A factor of W of the ranks' combination, or of a loss whose gradients are averaged."""
    n, world = step.window.n, step.window.world
    off = (step.combination.factor or 0.0) * world  # 1: averaged
    total = _total(term)
    # What the loss is computed from may go through the ranks: another finding.
    reduced = any(reduced_before_backward(step, what) for what in ("loss", "activation"))
    if near(off, world) and (term is None or (total is not None and near(total, world))):
        yield finding(
            "own_reduction_sums",
            f"Step {n}: the optimizer gets the sum of the {world} ranks' gradients, and not their "
            f"average. Right where each rank's loss is divided by the items of all ranks.",
            own_reduction(step) or step.window.first["step_place"],
            "grad.div_(dist.get_world_size()) after the all-reduce, or op=dist.ReduceOp.AVG.",
            predicts=Prediction(f"{world} = W", float(world)),
        )
    elif near(off, 1.0) and term is not None and not reduced:
        yield from _of_the_loss(step, term, world, total)
    elif total is not None and near(total, 1 / world) and off < 1:
        twice = near(off, 1 / world)
        yield finding(
            "scaled_by_world_size" if twice else "missing_world_size_factor",
            f"Step {n}: the optimizer gets the sum of the ranks' gradients × "
            f"{number(step.combination.factor or 0.0)}. With the loss of each rank, the weights of "
            f"all {number(term.items if term else 0)} items add up to {number(total)}.",
            own_reduction(step) or step.window.first["step_place"],
            "Divide by the world size once: remove the second division."
            if twice
            else "Multiply the gradients by dist.get_world_size(), too.",
            predicts=Prediction(f"1/{world} = 1/W", 1 / world),
        )


def _total(term: Term | None) -> float | None:
    """T where it tells about the loss: of means, and of sums in which all items weigh the same."""
    if term is None or not _plain(term):
        return None
    return term.total if term.reduction == "mean" or _same_weights(term) else None


def _plain(term: Term) -> bool:
    """Whether each rank and micro-batch has one such term, and all items of one weigh the same."""
    return term.regular and not term.several and not any(uneven(e.fact) for e in term.entries)


def _of_the_loss(step: Step, term: Term, world: int, total: float | None) -> Iterator[Finding]:
    """A factor of W in a loss whose gradients are averaged."""
    n, once = step.window.n, Prediction(f"1/{world} = 1/W", 1 / world)
    exchange = any(
        call["through_autograd"] and len(call.get("shape", ())) > 1
        for fact in step.window.facts
        for call in fact["collectives"]
    )
    for op, wrong, how in (("/", 1 / world, "divided"), ("*", float(world), "multiplied")):
        factor = _worldly(term, op, world)
        if factor is None or total is None or not near(total, wrong):
            continue
        if op == "/" or not any(gathers_of(fact) for fact in step.window.facts):
            yield finding(
                "scaled_by_world_size",
                f"Step {n}: the loss is {how} by {world} ({factor['text']}), and the gradients are "
                f"averaged over {world} ranks. The weights of the {number(term.items)} items that "
                f"{term.function} counts add up to {number(wrong)}.",
                factor["place"],
                "Remove the factor, if each rank takes the mean over its own items.",
                predicts=Prediction(f"{number(wrong)} = {'W' if op == '*' else '1/W'}", wrong),
            )
        return
    undivided = term.reduction == "sum" and all(near(e.share, e.count) for e in term.entries)
    if undivided and not exchange:
        yield finding(
            "missing_world_size_factor",
            f"Step {n}: each rank's loss is a sum over its items, which nothing divides, and the "
            f"gradients are averaged over {world} ranks: 1/{world} of the gradient of the sum over "
            f"all items.",
            term.place,
            "Multiply the loss by dist.get_world_size(), or use the mean over the items.",
            predicts=replace(once, undivided=True),
        )
    divisor = _count_of_all(step, term)
    if divisor is not None and _worldly(term, "*", world) is None:
        counts = [number(one.count) for one in term.by(lambda entry: entry.rank).values()]
        yield finding(
            "missing_world_size_factor",
            f"Step {n}: each rank's loss is a sum that is divided by {number(divisor['value'])} "
            f"({divisor['text']}), and the ranks have {', '.join(counts[:8])} items. The gradients "
            f"are then averaged over the {world} ranks, which divides by {world} again.",
            divisor["place"],
            "Multiply the loss by dist.get_world_size(): the average divides by it again.",
            predicts=once,
        )


def _same_weights(term: Term) -> bool:
    return all(entry.count for entry in term.entries) and alike(
        [entry.share / entry.count for entry in term.entries]
    )


def _count_of_all(step: Step, term: Term) -> ScalingFact | None:
    """A divisor of a sum that is the number of items of all ranks, in the step or in one pass.

    Nothing else divides or multiplies, but for the number of micro-batches.
    """
    if term.reduction == "mean" or gathers_of(step.window.first) or not _same_weights(term):
        return None
    weight = term.entries[0].share / term.entries[0].count
    by_rank, by_micro = (
        [one.count for one in term.by(key).values()]
        for key in (lambda entry: entry.rank, lambda entry: entry.micro)
    )
    for one in term.scaling:
        divided = [near(weight * one["value"], of) for of in (1.0, 1 / term.micros)]
        of_all = any(near(one["value"], count) for count in (sum(by_rank), *by_micro))
        own = any(near(one["value"], count) for count in by_rank)  # right, as it stands
        if one["op"] == "/" and any(divided) and of_all and not own:
            return one
    return None


def _worldly(term: Term, op: str, world: int) -> ScalingFact | None:
    """The scaling by the world size, recognized by its value and by how the source names it."""
    inverse = {"/": "*", "*": "/"}[op]
    for one in term.scaling:
        by = one["op"] == op and near(one["value"], world)
        by_inverse = one["op"] == inverse and near(one["value"], 1 / world)
        if (by or by_inverse) and WORLD.search(one["operand"]):
            return one
    return None


def own_reduction(step: Step) -> str:
    """Where the script combines gradients itself, or something like them."""
    calls = [
        (call.get("what") in ("gradient", "flat"), call["place"])
        for fact in step.window.facts
        for call in fact["collectives"]
        if call["op"] in ("all_reduce", "reduce") and call.get("numel", 0) > 1
    ]
    return max(calls, key=lambda call: call[0], default=(False, ""))[1]


@rule("loss_not_divided_by_accumulation")
def loss_not_divided_by_accumulation(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """The means of K micro-batches are added undivided.

    Right if the sum is meant, as with several losses of one batch. How many micro-batches a script
    takes is no part of what --certify compares.
    """
    for step in firsts(steps) if run.weighed else ():
        term = step.main
        if term is None or term.reduction != "mean" or not term.is_loss or not _plain(term):
            continue
        shares = [entry.share for entry in term.entries]
        if term.micros > 1 and alike([1.0, *shares]) and _other_data(step, term):
            yield finding(
                "loss_not_divided_by_accumulation",
                f"Step {step.window.n}: {term.micros} micro-batches, and the mean of each is added "
                f"undivided.",
                step.window.backward_place or term.place,
                f"loss = loss / {term.micros} before backward (the number of accumulation steps).",
                predicts=Prediction(f"{term.micros} times the mean", outside=MICRO_BATCHES),
            )


def _other_data(step: Step, term: Term) -> bool:
    """Whether the backward passes are over different data: not several losses of one batch."""
    for fact in step.window.facts:
        inputs = [str(tensors) for tensors in fact["inputs"]]
        if inputs and (len(inputs) < term.micros or len(set(inputs)) < term.micros):
            return False
    return True


def reduced_before_backward(step: Step, what: str) -> CollectiveFact | None:
    """A plain all-reduce of a loss or an activation that a later backward needs."""
    for fact in step.window.facts:
        for call in fact["collectives"]:
            carries = call.get("what") == what and call.get("grad") and not call["through_autograd"]
            early = so_far(call, step.window) < step.window.backwards
            if call["op"] == "all_reduce" and carries and early and call.get("needed", True):
                return call
    return None


@rule("loss_reduced_before_backward")
def loss_reduced_before_backward(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """What backward needs goes through a plain all-reduce, which autograd does not see: each rank
    differentiates its own part, and the average divides by W.

    Right if the all-reduce comes after this loss's backward, or on a copy, or through
    torch.distributed.nn. Right for the loss itself unless a division by W follows: then only the
    printed number changes. Right if ranks split a model: the output of a row-parallel layer needs
    no gradient from other ranks.
    """
    for step in steps:
        world = step.window.world
        call = reduced_before_backward(step, "loss")
        divided = step.main is not None and _worldly(step.main, "/", world) is not None
        kind = "loss" if call is not None and divided else "tensor"
        if kind == "tensor":
            call = None if run.split else reduced_before_backward(step, "activation")
        if call is None or world < 2:
            continue
        what = f"a tensor of shape {call.get('shape')}" if kind == "tensor" else "the loss"
        divides = ", and it is divided by the world size" if kind == "loss" else ""
        yield finding(
            "loss_reduced_before_backward",
            f"Step {step.window.n}: dist.all_reduce on {what}, which backward still needs{divides}."
            f" Autograd does not see the all-reduce: each rank differentiates its own part only.",
            call["place"],
            "Back-propagate the local loss, and all-reduce loss.detach() for the log; or use "
            "torch.distributed.nn.functional.all_reduce, which autograd sees.",
            predicts=Prediction(f"1/{world} = 1/W", 1 / world),
        )
        return
