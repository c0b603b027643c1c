"""Gradients that the ranks do not have in common when the optimizer steps, and why.

That they differ, or are no multiple of the sum of what the ranks computed, is measured.
"""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from ddp_doctor.explain.combination import FITS, computed_alike, local_and_final, untouched
from ddp_doctor.explain.findings import Finding, Prediction, finding, rule
from ddp_doctor.explain.numbers import alike, number
from ddp_doctor.explain.steps import Step
from ddp_doctor.facts.merged import Run, Window, so_far
from ddp_doctor.facts.types import BackwardFact, CollectiveFact, WindowFact

CALL_THE_WRAPPER = (
    "Call the wrapper itself: loss = model(batch), not model.module(batch). If the loss needs the "
    "module's methods, compute it inside the module's forward."
)
MANUAL_BACKWARD = (
    "Call self.manual_backward(loss), not loss.backward(): with automatic_optimization = False, "
    "Lightning prepares the wrapper there."
)
KEEP_THE_WRAPPER = (
    "Keep what DistributedDataParallel(model) returns, and call that in the training loop: "
    "self.model = DistributedDataParallel(self.model)."
)


def _differing(run: Run) -> list[Window]:
    """Steps whose gradients differ between the ranks, where nothing shows that this is meant."""
    if run.world < 2 or run.averages_parameters or run.in_groups:
        return []
    return [window for window in run.complete if window.differing_gradients]


def _shown(window: Window) -> str:
    """How many gradients differ."""
    names = window.differing_gradients
    total = len(window.first["snapshot"]["hashes"])
    return f"{len(names)} of {total} gradients differ between the ranks, first {names[0]}."


@rule("model_changed_after_wrapping")
def changed_after_wrapping(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Parameters are new, unfrozen, converted, replaced or moved since the model was wrapped, and
    their gradients differ between the ranks.

    Right if a hook or an all-reduce of one's own makes their gradients equal, and for parameters
    that are frozen or that no optimizer trains.
    """
    for window in run.complete if run.world > 1 else ():
        changes = _changes(window)
        if not changes:
            continue
        listed = "; ".join(f"{name} {how}" for name, how in list(changes.items())[:4])
        more = f", and {len(changes) - 4} more" if len(changes) > 4 else ""
        yield finding(
            "model_changed_after_wrapping",
            f"Step {window.n}: since the model was wrapped: {listed}{more}. The wrapper's hooks "
            f"are not on them, and their gradients differ between the ranks.",
            str(run.wrappers[0]["place"]) if run.wrappers else "",
            "Change the model first, then wrap it: DistributedDataParallel(model) comes last.",
        )
        return


def _changes(window: Window) -> dict[str, str]:
    """What has changed of parameters whose gradients differ."""
    differing = {name.split(":")[-1] for name in window.differing_gradients}
    listed = [change for _, fact in window for change in fact["changed"]]
    return {one["name"]: one["how"] for one in listed if one["name"] in differing}


@rule("last_micro_batch_unsynced")
def last_micro_batch_unsynced(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """The last backward of a step ran under no_sync, so the optimizer saw local gradients; or
    fully_shard combined gradients in earlier micro-batches only.

    Right if something else combines the gradients: they are equal then. Right for local SGD, which
    averages the parameters.
    """
    for window in run.complete if run.world > 1 and not run.averages_parameters else ():
        for rank, fact in window:
            flags = synchronized(fact)
            at = f"Step {window.n}, rank {rank}: {len(fact['backwards'])} micro-batches, and"
            for op in sorted({call["op"] for call in fact["fsdp"]}):  # all-reduces of replicas, too
                last = max(so_far(call, window) for call in fact["fsdp"] if call["op"] == op)
                if last < len(fact["backwards"]) - 1:
                    flag = "all_reduce" if op == "all_reduce" else "gradient_sync"
                    yield finding(
                        "last_micro_batch_unsynced",
                        f"{at} the last {op} is in backward {last + 1}. The optimizer does not get "
                        f"the gradients of later ones: they wait for the next step's.",
                        fact["backwards"][-1]["place"],
                        f"model.set_requires_{flag}(True) before the last micro-batch's forward.",
                    )
                    return
            if window.differing_gradients and flags and flags[-1] is False:
                yield finding(
                    "last_micro_batch_unsynced",
                    f"{at} the forward of the last one ran under no_sync(). {_shown(window)}",
                    fact["forwards"][-1]["place"] if fact["forwards"] else "",
                    "Leave no_sync() for the last micro-batch: "
                    "with model.no_sync() if k < K - 1 else nullcontext().",
                )
                return


def synchronized(fact: WindowFact) -> list[bool]:
    """For each backward that reached a wrapper: whether it was synchronized in the first one."""
    flags = []
    for backward in fact["backwards"]:
        for index, reached in backward.get("wrappers", {}).items():
            if reached and backward["prepared"].get(index) is not None:
                flags.append(bool(backward["prepared"][index]))
                break
    return flags


@rule("wrapper_bypassed", "two_backwards")
def wrapper_bypassed(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Backward reaches a wrapped model that no forward has prepared, or a second time, and the
    gradients differ. The wrapper averages gradients once per forward that is called on it.

    Right if the gradients are combined in another way: they are equal on all ranks then. A backward
    under no_sync is prepared, and is another rule's subject. Right too for local SGD, which
    averages the parameters, and for parts of a model.
    """
    for window in _differing(run) if run.wrappers else ():
        if {n.split(":")[-1] for n in window.differing_gradients} <= _changes(window).keys():
            continue
        for rank, fact in window:
            again, backward = _unprepared(fact)
            gone = [run.wrappers[at] for at in fact["gone"] if at < len(run.wrappers)]
            if backward is None or (gone and not again):
                continue
            terms = backward.get("terms") or ()
            where = terms[0]["place"] if terms else backward["place"]
            if again:
                yield finding(
                    "two_backwards",
                    f"Step {window.n}, rank {rank}: a second backward ran through the same "
                    f"forward. The wrapper averages once per forward. {_shown(window)}",
                    where,
                    "Add the losses, and call backward once: (loss_1 + loss_2).backward().",
                )
                return
            manual = any(wrapper["manual"] for wrapper in run.wrappers)
            yield finding(
                "wrapper_bypassed",
                f"Step {window.n}, rank {rank}: backward reached the wrapped model, but no forward "
                f"of the wrapper came before it. {_shown(window)}",
                backward["place"] if manual else where,
                MANUAL_BACKWARD if manual else CALL_THE_WRAPPER,
            )
            return


def _unprepared(fact: WindowFact) -> tuple[bool, BackwardFact | None]:
    """A backward that no forward prepared, and whether one before it had kept the same graph."""
    kept: set[str] = set()
    found: list[tuple[bool, BackwardFact | None]] = []
    for backward in fact["backwards"]:
        for index, reached in backward.get("wrappers", {}).items():
            prepared = backward["prepared"].get(index)
            if reached and prepared is None:
                found.append((index in kept, backward))
            elif reached and prepared and backward.get("retained"):
                kept.add(index)
    return max(found, key=lambda one: one[0], default=(False, None))


@rule("wrapper_lost")
def wrapper_lost(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """In every observed step the ranks' gradients differ, and nothing was seen that combines them:
    no wrapper whose forward prepared a backward, and no collective of gradients or parameters.

    Right if parameters are averaged from time to time (local SGD), and if the ranks' models are
    different on purpose: those do not start from the same weights.
    """
    windows = _differing(run)
    facts = [fact for window in windows for _, fact in window]
    if not windows or len(windows) < len(run.complete) or run.models_differ:
        return
    prepared = any(any(b["prepared"].values()) for fact in facts for b in fact["backwards"])
    in_backward = any("stepped_in_backward" in fact for fact in facts)
    if prepared or in_backward or any(fact["sharded"] or _touches_model(fact) for fact in facts):
        return
    window, gone = windows[0], facts[0]["gone"]
    why, fix = _why_lost(run, facts, gone)
    if why:
        yield finding(
            "wrapper_lost",
            f"Step {window.n}: {_shown(window)} {why}",
            window.first["step_place"],
            fix,
        )


def _why_lost(run: Run, facts: list[WindowFact], gone: list[int]) -> tuple[str, str]:
    """What was seen instead of a backward that a wrapper combines, and the line to write."""
    if not any(fact["backwards"] for fact in facts):
        return (
            "No backward() ran: the gradients came another way, such as torch.autograd.grad, in "
            "which DistributedDataParallel does nothing.",
            "loss.backward(), or all-reduce and divide each gradient before optimizer.step().",
        )
    if gone:
        made = [one["place"] for one in run.wrappers if one["index"] in gone]
        return f"The wrapper made at {', '.join(made)} no longer exists.", KEEP_THE_WRAPPER
    if not run.wrappers:
        return (
            "There is no wrapper, and no collective of gradients.",
            "model = DistributedDataParallel(model), and train what it returns.",
        )
    reached = any(n for fact in facts for b in fact["backwards"] for n in b["wrappers"].values())
    if reached:
        return "", ""  # the subject of wrapper_bypassed
    return (
        "Backward reached no parameter of a wrapped model.",
        "Train the parameters of what DistributedDataParallel returns, or wrap this model, too.",
    )


def _touches_model(fact: WindowFact) -> bool:
    return any(
        call.get("what") in ("gradient", "parameter", "flat", "like a gradient")
        or call.get("numel", 0) > 64
        for call in fact["collectives"]
        if not call["op"].endswith("barrier")
    )


@rule("optimizer_in_backward")
def optimizer_in_backward(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """The optimizer steps from a hook, while backward is still running, and the gradients differ.

    Correct with one rank, if the script has reduced every gradient before the step, and with
    sharded parameters: their gradients are reduced before such hooks run.
    """
    for window in run.windows if run.world > 1 else ():
        for rank, fact in window:
            at = fact.get("stepped_in_backward")
            if at is not None and window.differing_gradients and not window.sharded:
                yield finding(
                    "optimizer_in_backward",
                    f"Step {window.n}, rank {rank}: optimizer.step() was called inside backward, "
                    f"from a hook that sees the local gradient before it is averaged.",
                    at,
                    "Step after backward() has returned, or reduce the gradient in the hook first.",
                )
                return


@rule("parameters_averaged")
def parameters_averaged(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Parameters, not gradients, are all-reduced in every step.

    Right for local SGD, which averages every few steps: at least one observed step without it. With
    SGD without momentum it equals averaging the gradients: a note.
    """
    # The all-reduce after step n is seen in the window of step n + 1.
    calls = [(window, _of_parameters(window)) for window in run.complete[1:]]
    if run.world < 2 or not calls:
        return
    if not all(ones and window.differing_gradients for window, ones in calls):
        return
    window, ones = calls[0]
    optimizers = [fact for rank in run.ranks for fact in rank.facts["optimizer"]]
    momentum = bool(optimizers) and optimizers[0]["momentum"]
    yield finding(
        "parameters_averaged",
        f"Step {window.n}: {len(ones)} all-reduces of parameters in every step; the gradients are "
        f"each rank's own"
        + (f", and so is the state of {optimizers[0]['type']}." if momentum else "."),
        ones[0]["place"],
        "All-reduce parameter.grad between backward() and step(), and leave the parameters alone.",
        None if momentum else "note",
    )


def _of_parameters(window: Window) -> list[CollectiveFact]:
    """The all-reduces of parameters. All in one tensor look like all gradients in one."""
    return [
        call
        for _, fact in window
        for call in fact["collectives"]
        if call["op"] == "all_reduce"
        if call.get("what") == "parameter"
        or (call.get("what") == "flat" and so_far(call, window) == 0)
    ]


@rule("manual_all_reduce_skips_none")
def manual_all_reduce_skips_none(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """An own loop all-reduces gradients, and ranks disagree about which of them are None.

    Right if the same gradients are None on all ranks: then the loop calls the same collectives.
    """
    for window in run.windows if run.world > 1 else ():
        sent = {rank: [c for c in fact["collectives"] if _is_gradient(c)] for rank, fact in window}
        missing = [set(snapshot["missing"]) for snapshot in window.snapshots().values()]
        disagree = sorted(missing[0].union(*missing) - missing[0].intersection(*missing))
        if disagree and len({tuple(c.get("name") for c in calls) for calls in sent.values()}) > 1:
            listed = ", ".join(f"rank {rank}: {len(call)}" for rank, call in list(sent.items())[:8])
            yield finding(
                "manual_all_reduce_skips_none",
                f"Step {window.n}: gradients all-reduced by hand: {listed}. {disagree[0]}"
                + (f" and {len(disagree) - 1} more have" if len(disagree) > 1 else " has")
                + " a gradient on some ranks only, so the ranks' all-reduces pair up wrongly.",
                next(call["place"] for calls in sent.values() for call in calls),
                "if p.grad is None: p.grad = torch.zeros_like(p), and all-reduce every parameter.",
            )
            return


def _is_gradient(call: CollectiveFact) -> bool:
    return call["op"] == "all_reduce" and call.get("what") == "gradient"


@rule("other_than_average")
def other_than_average(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """What an optimizer gets is no multiple of the sum of all that the ranks' backwards computed.

    Measured for parameters of fully_shard, and where the script reduces a gradient more often than
    once per step. Right if the script, a hook, or a compression changes gradients on purpose: what
    backward leaves is then not what the optimizer gets, or was reduced once.
    """
    found = []
    for step in steps:
        if step.combination.kind != "unknown" or step.combination.residual <= FITS:
            continue
        for _, fact in step.window:
            calls = [call for call in fact["collectives"] if _is_gradient(call)]
            moments = {str(call["backwards"]) for call in calls}
            often = Counter(call.get("name", "") for call in calls).most_common(1)
            again = (calls[0], *often[0]) if often and often[0][1] > 1 < len(moments) else None
            if again or (fact["snapshot"]["pieces"] and untouched(fact)) or fact.get("handed"):
                found.append((step, fact, again))
                break
    if not found or 2 * len(found) < len(steps):
        return
    step, fact, again = found[0]
    said = f"{again[1]} is all-reduced {again[2]} times in this step. " if again else ""
    yield finding(
        "other_than_average",
        f"Step {step.window.n}: {said}Of the gradients that the optimizer gets, "
        f"{step.combination.residual:.0%} is no multiple of the sum of what the ranks' backwards "
        f"computed. Seen in {len(found)} of {len(steps)} observed steps.",
        again[0]["place"] if again else fact["step_place"],
        "Reduce each gradient once per step, after the last micro-batch's backward.",
    )


@rule("wrong_group")
def wrong_group(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Where ranks hold parts of a model, the same sum of local gradients arrives with another
    factor for some parameters.

    Right if a loss or a layer is meant to have that factor.
    """
    smaller = any(
        "group" in call and call.get("what") == "gradient"
        for window in run.complete
        for _, fact in window
        for call in fact["collectives"]
    )
    factors = _factors_of_all(run) if not run.in_groups and (run.split or smaller) else {}
    if alike(list(factors.values())):
        return
    kinds: dict[str, list[str]] = {}
    for name, factor in factors.items():
        kinds.setdefault(number(float(f"{factor:.3g}")), []).append(name)
    listed = "; ".join(
        f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: × {factor}"
        for factor, names in sorted(kinds.items(), key=lambda kind: len(kind[1]))[:4]
    )
    yield finding(
        "wrong_group",
        f"The sum of the ranks' gradients is multiplied by another number for some parameters, in "
        f"each observed step: {listed}.",
        run.complete[0].first["step_place"],
        "Sum each gradient over the ranks with a copy of its parameter, count each loss term once, "
        "and divide by all items once.",
        "hint",
        Prediction("other factors", outside="ranks that hold parts of a model"),
    )


def _factors_of_all(run: Run) -> dict[str, float]:
    """Each parameter's factor, where it is the same in several steps.

    Ranks that share their data compute each term of a whole parameter once each. The same for a
    shard, unless no exchange in backward adds up the ranks' terms, as with DTensors: whichever
    makes all factors alike.
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
    copies = {name for name in sure if len(run.copies.get(name, [[]])) == 1}
    whole = {name: sure[name] * _times_computed(run, windows, name) for name in copies}
    kept = any(rank.start["shards"] for rank in run.ranks if rank.start)
    for terms in (1.0,) if kept else (1.0, run.world / len(run.readers)):
        factors = {name: whole.get(name, f * terms) for name, f in sure.items()}
        if alike(list(factors.values())):
            break
    return factors


def _times_computed(run: Run, windows: list[Window], name: str) -> float:
    """How many ranks compute each part of a gradient: all of it, if they all compute the same."""
    for groups in ([list(range(run.world))], run.readers):
        if all(computed_alike(window, name, groups) for window in windows):
            return run.world / len(groups)
    return 1.0


def _factors(window: Window) -> dict[str, float]:
    """For each parameter: its final gradient divided by the sum of the local ones."""
    found = {}
    for name in sorted({name for s in window.snapshots().values() for name in s["grads"]}):
        pairs = [
            pair for group in window.groups(name) for pair in local_and_final(window, name, group)
        ]
        square = sum(local * local for _, local in pairs)
        factor = sum(final * local for final, local in pairs) / square if square else math.nan
        fits = all(abs(final - factor * local) <= 0.02 * abs(final) for final, local in pairs)
        if math.isfinite(factor) and factor and fits:
            found[name] = factor
    return found


@rule("optimizer_on_other_parameters")
def optimizer_on_other_parameters(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """The optimizer steps parameters that backward never reaches.

    Right if another optimizer of the process holds the rest (GANs), and for parameters that are
    frozen by leaving them out of the optimizer in some steps only. Right if some steps have no
    backward, because their batches have no labels, and if the parameters move all the same: then
    their gradients are elsewhere.
    """
    for optimizer in dict.fromkeys(window.optimizer for window in run.windows):
        windows = [window for window in run.windows if window.optimizer == optimizer]
        last = list(takewhile(_without_gradient, reversed(windows)))
        if len(last) < min(2, len(windows)) or _moves(run, windows, last):
            continue
        window = last[-1]
        rank, fact = next(iter(window))
        fix = (
            "Call set_requires_gradient_sync(True), and set_requires_all_reduce(True) with "
            "replicas, before the forward of the last micro-batch."
            if window.sharded
            else "Create the optimizer from the parameters of the model that is trained, after "
            "wrapping, sharding, or moving it."
        )
        yield finding(
            "optimizer_on_other_parameters",
            f"Step {window.n}, rank {rank}: none of the optimizer's parameters has a gradient."
            + (f" {outside} others have one." if (outside := fact["stale"]["outside"]) else ""),
            fact["step_place"],
            fix,
        )
        return


def _moves(run: Run, windows: list[Window], last: list[Window]) -> bool:
    """Whether the last steps, which have no gradients, change the parameters."""
    before = {rank.rank: rank.start["parameters"] for rank in run.ranks if rank.start}
    for window in windows[: -len(last)]:
        before |= {rank: fact["after"]["parameters"] for rank, fact in window}
    return any(
        before[rank].get(name, held) != held
        for rank, fact in last[0]
        if rank in before
        for name, held in fact["after"]["parameters"].items()
    )


def _without_gradient(window: Window) -> bool:
    """Whether no rank's optimizer has a gradient, though it could have some."""
    snapshots = [fact["snapshot"] for _, fact in window]
    unused = any(fact["stale"]["outside"] for _, fact in window)
    whole = not window.sharded or all(fact["dtensors"] for _, fact in window)
    return (
        whole
        and not window.skipped
        and not any(snapshot["hashes"] for snapshot in snapshots)
        and (unused or any(snapshot["missing"] for snapshot in snapshots))
    )
