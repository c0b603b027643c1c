"""Loss and counts: the weights of all items have to be equal, and to sum to 1."""

import re
from collections.abc import Iterator
from dataclasses import replace

from ddp_doctor.explain.equation import Equation, Step, by_optimizer, is_literal, usual_length
from ddp_doctor.explain.findings import Finding, Severity, finding
from ddp_doctor.explain.numbers import alike, near, number
from ddp_doctor.explain.rules.groups import other_factors
from ddp_doctor.explain.rules.pairs import gathers_of
from ddp_doctor.facts.merged import Run, so_far
from ddp_doctor.facts.types import CollectiveFact, ScalingFact, uneven

WORLD = re.compile(
    r"world|num_replicas|num_processes|n_?procs?\b|n_?gpus?\b|num_?gpus|n_?ranks|num_ranks|"
    r"num_devices|nproc|replicas|workers|\bsize\b|\bW\b|\bws\b",
    re.IGNORECASE,
)
WINDOW = re.compile(
    r"accum|micro|\bgas\b|grad_acc|\bK\b|ga_steps|n_chunks|num_chunks", re.IGNORECASE
)
FEW = 0.3


def unequal_denominators(run: Run, equation: Equation) -> Iterator[Finding]:
    """Each rank divides by its own count, and the counts differ; also in one of several losses.

    Right if the counts are equal, or if the loss is divided by a count that all ranks share: the
    weights are equal then. Right if a column of the loss is one sample, and all samples count
    alike. A smaller last batch of an epoch is a note.
    """
    steps = [step for step in equation.steps if step.world > 1 and _combined(step)]
    found = []
    for step in steps:
        losses = [other for other in step.others if other.entries[0].fact["loss"]]
        for term in (step, *losses):
            sums = list(term.by(lambda entry: entry.rank).values())
            if _own_counts(term, sums) or _own_divisors(term, sums):
                found.append((_ratio(sums), term, [share / count for count, share in sums]))
                break
    if not found:
        yield from _columns_with_own_counts(steps)
        yield from _ranks_without_items(steps, equation)
        return
    ratio, step, weights = max(found, key=lambda case: case[0])
    later = not any(_is_first(term, equation) for _, term, _ in found)
    counts = {rank: count for rank, (count, _) in step.by(lambda entry: entry.rank).items()}
    heavy, light = weights.index(max(weights)), weights.index(min(weights))
    listed = ", ".join(f"rank {r} has {number(c)}" for r, c in list(counts.items())[:8])
    unequal = finding(
        "unequal_denominators",
        f"Step {step.window.n}: {listed} items. Each rank divides by its own count, so an "
        f"item on rank {heavy} weighs {ratio:.2f} times an item on rank {light}. Seen in "
        f"{len(found)} of {len(steps)} observed steps.",
        step.place,
        _global_count(step),
        _how_bad(ratio, len(found), len(steps)),
    )
    yield replace(unequal, later=later)


def _columns_with_own_counts(steps: list[Step]) -> Iterator[Finding]:
    """As above, where each column of a loss, such as a task, is divided by its own count."""
    found = [(seen, step) for step in steps if (seen := _furthest_column(step))]
    if not found:
        return
    (ratio, column, counts), step = max(found, key=lambda case: case[0])
    ranks = [entry.rank for entry in step.entries]
    listed = [f"rank {r} has {number(n)}" for r, n in zip(ranks, counts, strict=True)]
    yield finding(
        "unequal_denominators",
        f"Step {step.window.n}: each rank divides each column of the loss by its own count. In "
        f"column {column}, {', '.join(listed[:8])} items, so an item of one rank weighs "
        f"{ratio:.2f} times an item of another. Seen in {len(found)} of {len(steps)} observed "
        f"steps.",
        step.place,
        "Count the items of each column with dist.all_reduce(counts), and back-propagate "
        "(loss_sums * world_size / counts).mean() over the columns.",
        _how_bad(ratio, len(found), len(steps)),
    )


def _is_first(step: Step, equation: Equation) -> bool:
    """Whether it is an optimizer's first step."""
    return step.window.n < len({each.optimizer for each in equation.steps})


def _ranks_without_items(steps: list[Step], equation: Equation) -> Iterator[Finding]:
    """As above, where a rank has no item in a step, and counts in the average all the same."""
    having = [{entry.rank for entry in step.entries if entry.count} for step in steps]
    if any(step.readers < step.world for step in steps):
        return
    for step, ranks in zip(steps, having, strict=True):
        without = set(step.window.ranks) - ranks
        sometimes = without <= set.union(*having)  # and is no rank that never has a loss
        if without and sometimes and near(step.total, len(ranks) / step.world):
            listed = ", ".join(map(str, sorted(without)[:8]))
            unequal = finding(
                "unequal_denominators",
                f"Step {step.window.n}: rank {listed} has no items, and the average over "
                f"{step.world} ranks counts it all the same: the items of the others weigh "
                f"{number(step.total)} times 1/N.",
                step.place,
                _global_count(step),
            )
            yield replace(unequal, later=not _is_first(step, equation))
            return


def _furthest_column(step: Step) -> tuple[float, int, list[float]] | None:
    """The column with the largest ratio of counts between ranks that all give it one weight.

    None if there is none, or if some column does not have one weight on all ranks.
    """
    of_ranks = [entry.fact.get("columns", []) for entry in step.entries]
    once = len({entry.rank for entry in step.entries}) == len(of_ranks) > 1
    if not once or len({len(columns) for columns in of_ranks}) > 1:
        return None
    furthest = (1.0, 0, [1.0])
    for at, ranks in enumerate(zip(*of_ranks, strict=True)):
        counts = [count for count, _ in ranks]
        if min(counts) and not alike([weight for _, weight in ranks], 0.002):
            return None
        if min(counts):
            furthest = max(furthest, (max(counts) / min(counts), at, counts))
    return furthest if furthest[0] > 1.003 else None


def unequal_denominators_accumulation(run: Run, equation: Equation) -> Iterator[Finding]:
    """Each micro-batch divides by its own count, and the counts differ.

    Right if the micro-batches have equal counts, or share the count of the whole window. Right if
    they are several losses, and no micro-batches.
    """
    steps = [step for step in equation.steps if step.micros > 1 and not step.several]
    found = []
    for step in steps:
        micros = step.by(lambda entry: (entry.rank, entry.micro))
        kinds = [
            [sums for (of, _), sums in micros.items() if of == rank] for rank, _ in step.window
        ]
        kinds.append(list(step.by(lambda entry: entry.micro).values()))
        unequal = [sums for sums in kinds if _own_counts(step, sums)]
        if unequal:
            sums = max(unequal, key=_ratio)
            found.append((_ratio(sums), step, [count for count, _ in sums]))
    if not found:
        return
    ratio, step, counts = max(found, key=lambda case: case[0])
    listed = ", ".join(number(count) for count in counts[:8])
    yield finding(
        "unequal_denominators_accumulation",
        f"Step {step.window.n}: the micro-batches have {listed} items, and each is divided by its "
        f"own count. An item of the smallest weighs {ratio:.2f} times one of the largest. Seen in "
        f"{len(found)} of {len(steps)} observed steps.",
        step.place,
        _global_count(step),
        _how_bad(ratio, len(found), len(steps)),
    )


def _own_counts(step: Step, sums: list[tuple[float, float]]) -> bool:
    """Whether groups of items with different counts receive the same total weight."""
    counts = [count for count, _ in sums]
    shares = [share for _, share in sums]
    if len(sums) < 2 or min(counts) <= 0 or min(shares) <= 0 or alike(counts, 0.003):
        return False
    if any(uneven(entry.fact) for entry in step.entries):
        return False  # items of one call weigh differently by design: another unit than the item
    return alike(shares, 0.002)


def _own_divisors(step: Step, sums: list[tuple[float, float]]) -> bool:
    """Whether the ranks visibly divide by different numbers, and these explain the weights.

    Catches counts that include more than the loss does, such as the label that a shift drops.
    """
    divisors: list[float] = []
    for _, fact in step.window:
        values = {
            operation["value"]
            for operation in fact["scaling"]
            if operation["op"] == "/" and operation["value"] > 1 and not is_literal(operation)
        }
        if len(values) != 1:
            return False
        divisors += values
    if len(divisors) != len(sums) or alike(divisors, 0.003) or min(c for c, _ in sums) <= 0:
        return False
    weights = [share / count for count, share in sums]
    return alike([weight * d for weight, d in zip(weights, divisors, strict=True)], 0.002)


def _ratio(sums: list[tuple[float, float]]) -> float:
    weights = [share / count for count, share in sums]
    return max(weights) / min(weights)


def _how_bad(ratio: float, seen: int, of: int) -> Severity | None:
    few = of >= 3 and seen / of < FEW
    return "note" if ratio < 1.02 or few else None


def _combined(step: Step) -> bool:
    return not step.combination.local and step.combination.kind not in ("alone", "apart")


def _global_count(step: Step) -> str:
    start = "Use reduction='sum'" if step.reduction == "mean" else "Keep the sum"
    window = " of all micro-batches" if step.micros > 1 else ""
    if step.world == 1:
        return f"{start}, count the items{window} first, and back-propagate loss_sum / count."
    return (
        f"{start}, count the items{window} with dist.all_reduce(count), and back-propagate "
        f"loss_sum * world_size / count."
    )


def scale(run: Run, equation: Equation) -> Iterator[Finding]:
    """The sum of all weights is K, 1/K, W or 1/W instead of 1.

    Right if factors cancel: W times a global count, or an all-reduce that sums a loss divided by N.
    Right too if the factor is a coefficient that the code writes as a number, or if ranks have
    other numbers of terms: then one term does not tell the weights.
    """
    if run.split and next(other_factors(run), None) is not None:
        return  # no one factor is that of all parameters
    findings: dict[str, list[Finding]] = {}
    checked = 0
    usual = {at: usual_length(steps) for at, steps in by_optimizer(equation.steps).items()}
    for step in equation.steps:
        if step.micros != usual[step.optimizer]:
            continue  # the subject of partial_window_divided_by_k
        alone = step.combination.local and step.micros < 2
        shared = (
            step.window.sharded and step.readers < step.world
        )  # one batch, cut along its length
        unknown = step.combination.kind == "unknown" and step.combination.residual > 0
        if alone or shared or unknown or step.terms_differ:
            continue
        checked += 1
        for found in (*_scale(step), *_of_means(step)):
            findings.setdefault(found.code, []).append(found)
    for seen in findings.values():
        if len(seen) >= FEW * checked:
            yield seen[0]


def _scale(step: Step) -> Iterator[Finding]:
    """What is wrong with one step's sum of weights: with the ranks' part of it, and the loss's."""
    combined = 1.0 if step.combination.local else step.alpha * step.world  # 1: averaged
    total = combined / step.world * sum(entry.share for entry in step.entries)
    if not total > 0 or near(total, 1.0):
        return
    loss = total / combined
    wrong_k = _of_micro_batches(step, total, loss)
    if wrong_k is None and near(total, step.coefficient):
        return  # a choice
    each = [entry.share / entry.count for entry in step.entries if entry.count]
    if not each:
        return
    if step.reduction == "sum" and alike(each) and near(each[0], 1.0):
        yield from _of_a_sum(step, total, combined)
    elif step.reduction != "sum" or not alike(each) or not near(each[0], step.world):
        yield from _of_the_ranks(step, total, combined)
        if wrong_k is not None:
            yield wrong_k
            loss *= step.micros if wrong_k.code == "loss_divided_twice" else 1 / step.micros
        yield from _of_the_loss(step, total, loss)


def _of_means(step: Step) -> Iterator[Finding]:
    """A mean that is taken of what an uneven loss has become, as of preferences, tells K too."""
    uneven_loss = any(uneven(entry.fact) for entry in step.entries)
    for mean in step.others if uneven_loss and not step.combination.local else ():
        averaged = near(mean.alpha * mean.world, 1.0) and mean.function == "mean"
        if averaged and (wrong_k := _of_micro_batches(mean, mean.total, mean.total)):
            yield wrong_k


def _of_a_sum(step: Step, total: float, combined: float) -> Iterator[Finding]:
    """Nobody divides the loss: the reference is the gradient of the sum over all items."""
    world = step.world
    if world > 1 and near(total, 1 / world):
        yield finding(
            "missing_world_size_factor",
            f"Step {step.window.n}: the gradients are averaged over {world} ranks, and after "
            f"backward they are divided by the {number(step.items)} items of all ranks as well. "
            f"The weights add up to {number(total)} instead of 1, so the gradient is {world} times "
            f"too small.",
            step.place,
            "Multiply the gradients by dist.get_world_size(), too.",
        )
    elif world > 1 and near(combined, 1.0) and not _whole_on_each_rank(step):
        yield finding(
            "missing_world_size_factor",
            f"Step {step.window.n}: the loss sums over the items and the gradients are averaged "
            f"over {world} ranks: they are {world} times smaller than those of the sum over all "
            f"items.",
            step.place,
            "Multiply the loss by dist.get_world_size(), or use the mean over the items.",
        )


def _of_the_ranks(step: Step, total: float, combined: float) -> Iterator[Finding]:
    world = step.world
    if world > 1 and near(combined, world):
        yield finding(
            "own_reduction_sums",
            f"Step {step.window.n}: the gradients are summed over {world} ranks, and nothing "
            f"divides them: all weights together are {number(total)}, not 1.",
            _reduction_place(step) or step.place,
            "grad.div_(dist.get_world_size()) after the all-reduce, or op=dist.ReduceOp.AVG.",
        )
    elif world > 1 and near(combined, 1 / world):
        yield finding(
            "scaled_by_world_size",
            f"Step {step.window.n}: the gradients are divided by the world size once more after "
            f"they were averaged: all weights together are {number(total)}.",
            _reduction_place(step) or step.place,
            "Remove the all-reduce and the division: the wrapper has already averaged.",
        )


def _of_micro_batches(step: Step, total: float, loss: float) -> Finding | None:
    """The loss is off by K, possibly together with a factor of the world size."""
    world, micros = step.world, step.micros
    divisions = [
        operation
        for operation in _by_value(step, "/", micros)
        # The number 2 is half of a square, and another number may be the count of a loss's terms.
        if not is_literal(operation) or (micros > 2 and not step.others)
    ]
    if micros < 2 or near(loss, 1.0):
        return None
    if any(near(loss, micros * other) for other in (1.0, world, 1 / world)):
        if divisions or not _other_data(step):
            return None
        return finding(
            "loss_not_divided_by_accumulation",
            f"Step {step.window.n}: {micros} micro-batches with a mean each are added and nothing "
            f"divides by {micros}: the gradient is {micros} times too large.",
            step.window.backward_place or step.place,
            f"loss = loss / {micros} before backward (the number of accumulation steps).",
        )
    if any(near(loss, other / micros) for other in (1.0, world, 1 / world)):
        if len(divisions) < 2 or (micros == world and _worldly(step, "/")):
            return None
        places = ", ".join(operation["place"] for operation in divisions)
        return finding(
            "loss_divided_twice",
            f"Step {step.window.n}: the loss is divided by the {micros} accumulation steps twice: "
            f"all weights together are {number(total)} (divisions at {places}).",
            divisions[0]["place"],
            f"Remove one of the two divisions by {micros}.",
        )
    return None


def _of_the_loss(step: Step, total: float, loss: float) -> Iterator[Finding]:
    """The loss is off by W, and it did not go through an all-reduce, which is another finding."""
    world = step.world
    if world == 1 or near(loss, 1.0) or _reduced_loss(step) is not None:
        return
    gathers = any(gathers_of(fact) for _, fact in step.window)
    for op, wrong, how in (("/", 1 / world, "divided"), ("*", float(world), "multiplied")):
        operation = _worldly(step, op)
        if op == "*" and gathers:
            continue  # each rank's loss of all rows carries the gradient of its own ones only
        if near(loss, wrong) and operation is not None:
            yield finding(
                "scaled_by_world_size",
                f"Step {step.window.n}: the loss is {how} by the world size ({operation['text']}), "
                f"and the gradients are averaged over the ranks: all weights together are "
                f"{number(total)}, not 1.",
                operation["place"],
                "Remove the factor. If each rank takes the mean over equally many items, the "
                "average of the ranks is already the mean over all items.",
            )
            return
    averaged = near(step.alpha * world, 1.0) or step.combination.local
    if averaged and near(loss, 1 / world) and step.reduction != "mean" and _divides_by_all(step):
        yield finding(
            "missing_world_size_factor",
            f"Step {step.window.n}: the loss is divided by the {number(step.items)} items of all "
            f"ranks, and the gradients are then averaged over {world} ranks as well. The weights "
            f"add up to {number(total)} instead of 1, so the gradient is {world} times too small.",
            step.place,
            "Multiply the loss by dist.get_world_size(): the average divides by it again.",
        )


def _other_data(step: Step) -> bool:
    """Whether the backward passes are over different data: not several losses of one batch."""
    if step.several:
        return False
    for _, fact in step.window:
        inputs = [str(tensors) for tensors in fact["inputs"]]
        if inputs and (len(inputs) < step.micros or len(set(inputs)) < step.micros):
            return False
    return True


def _by_value(step: Step, op: str, value: float) -> list[ScalingFact]:
    """The visible divisions or multiplications by a value; by its inverse, if it has a name."""
    return [
        operation
        for operation in step.scaling
        if (operation["op"] == op and near(operation["value"], value))
        or (
            operation["op"] != op
            and near(operation["value"], 1 / value)
            and not is_literal(operation)
        )
    ]


def _worldly(step: Step, op: str) -> ScalingFact | None:
    """The scaling by the world size, recognized by its value and by how the source names it."""
    for operation in _by_value(step, op, step.world):
        if WORLD.search(operation["operand"]) and not WINDOW.search(operation["operand"]):
            return operation
    return None


def _divides_by_all(step: Step) -> bool:
    """Whether the loss is divided by the items of all ranks: visibly, or as counts tell."""
    micros = step.by(lambda entry: entry.micro).values()
    wanted = [step.items, *(count for count, _ in micros)]
    seen = any(
        operation["op"] == "/" and any(near(operation["value"], count) for count in wanted)
        for operation in step.scaling
    )
    counts = [count for count, _ in step.by(lambda entry: entry.rank).values()]
    weights = [entry.share / entry.count for entry in step.entries if entry.count]
    return seen or (not alike(counts, 0.003) and alike(weights))


def _reduction_place(step: Step) -> str:
    """Where the script combines gradients itself, or something like them."""
    calls = [
        (call.get("what") in ("gradient", "flat"), call["place"])
        for _, fact in step.window
        for call in fact["collectives"]
        if call["op"] in ("all_reduce", "reduce") and call.get("numel", 0) > 1
    ]
    return max(calls, key=lambda call: call[0], default=(False, ""))[1]


def _whole_on_each_rank(step: Step) -> bool:
    """Whether each rank computes the loss of all from what a collective brings in its forward.

    SyncBatchNorm reduces through autograd, too, but vectors of statistics.
    """
    return _reduced_loss(step, "activation") is not None or any(
        call["through_autograd"] and len(call.get("shape", ())) > 1
        for _, fact in step.window
        for call in fact["collectives"]
    )


def _reduced_loss(step: Step, what: str = "loss") -> CollectiveFact | None:
    for _, fact in step.window:
        for call in fact["collectives"]:
            carries = call.get("what") == what and call.get("grad") and not call["through_autograd"]
            early = so_far(call, step.window) < step.window.backwards
            if call["op"] == "all_reduce" and carries and early and call.get("needed", True):
                return call
    return None


def loss_reduced_before_backward(run: Run, equation: Equation) -> Iterator[Finding]:
    """A loss that carries a graph goes through a plain all-reduce, and then through backward.

    Autograd does not see the all-reduce: only the division that follows changes the gradient. Right
    if the all-reduce comes after this loss's backward, or on a copy, or through
    torch.distributed.nn. The same for what a loss is computed from, but if ranks split a model: the
    output of a row-parallel layer needs no gradient from other ranks.
    """
    yield from _activation_reduced(run, equation)
    for step in equation.steps:
        call = _reduced_loss(step)
        if call is None:
            continue
        wrong = not near(step.total, 1.0)
        yield finding(
            "loss_reduced_before_backward",
            f"Step {step.window.n}: dist.all_reduce on a loss that backward still needs. Autograd "
            f"does not see it"
            + (f"; all weights together are {number(step.total)}, not 1." if wrong else "."),
            call["place"],
            "Back-propagate the local loss; all-reduce loss.detach() for the log, after backward.",
        )
        return


def _activation_reduced(run: Run, equation: Equation) -> Iterator[Finding]:
    for step in equation.steps:
        call = _reduced_loss(step, "activation")
        if call is None or run.split or step.world < 2:
            continue
        yield finding(
            "loss_reduced_before_backward",
            f"Step {step.window.n}: dist.all_reduce on a tensor of shape {call['shape']} that "
            f"backward still needs. The loss is that of all ranks, but autograd sees this rank's "
            f"part of the tensor only. The average over {step.world} ranks is then 1/{step.world} "
            f"of the gradient, where the loss is computed from this tensor alone.",
            call["place"],
            "torch.distributed.nn.functional.all_reduce(tensor), whose backward sums the ranks' "
            "gradients.",
        )
        return


RULES = (
    unequal_denominators,
    unequal_denominators_accumulation,
    scale,
    loss_reduced_before_backward,
)
