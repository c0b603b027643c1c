"""Gradients that the ranks do not have in common when the optimizer steps, and why.

That they differ, or are no multiple of the sum of what the ranks computed, is measured.
"""

from collections import Counter
from collections.abc import Iterator

from ddp_doctor.explain.combination import reduces_gradient, untouched
from ddp_doctor.explain.findings import Finding, finding, rule
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


@rule(
    "model_changed_after_wrapping",
    "last_micro_batch_unsynced",
    "optimizer_in_backward",
    "two_backwards",
    "wrapper_bypassed",
    "wrapper_lost",
)
def not_combined(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """The ranks' gradients differ when the optimizer steps. What was seen instead of an average:

    - model_changed_after_wrapping: these parameters are new, unfrozen, converted, replaced, or
      moved since the model was wrapped;
    - last_micro_batch_unsynced: the last backward's forward ran under no_sync; or fully_shard keeps
      gradients for a later backward;
    - optimizer_in_backward: the optimizer steps from a hook, before the wrapper's average;
    - two_backwards, wrapper_bypassed: backward reaches a wrapped model a second time, or with no
      forward before it that was called on the wrapper, which averages once per such forward;
    - wrapper_lost: in every observed step no wrapper and no collective combines them.

    Right if the gradients are combined in another way: they are equal on all ranks then. Right for
    local SGD, which averages the parameters, and for parts of a model.
    """
    if run.world < 2 or run.averages_parameters or run.in_groups:
        return
    seen = [window for window in run.complete if window.differing_gradients]
    found: dict[str, Finding] = {}
    for window in run.complete:
        for rank, fact in window:
            for one in _causes(run, window, f"Step {window.n}, rank {rank}:", fact):
                found.setdefault(one.code, one)
    if not found and seen and len(seen) == len(run.complete) and not run.split:
        found |= {one.code: one for one in _lost(run, seen)}
    yield from found.values()


def _causes(run: Run, window: Window, at: str, fact: WindowFact) -> Iterator[Finding]:
    """What was seen in one rank's step whose gradients were not combined."""
    if waiting := fact.get("waiting"):
        yield finding(
            "last_micro_batch_unsynced",
            f"{at} fully_shard has not reduced the last backward's gradients of {waiting} "
            f"parameters: they wait for the next step's.",
            fact["backwards"][-1]["place"] if fact["backwards"] else "",
            "model.set_requires_gradient_sync(True) before the last micro-batch's forward.",
        )
    if not window.differing_gradients:
        return
    flags, changes = synchronized(fact), _changes(window)
    if changes:
        listed = "; ".join(f"{name} {how}" for name, how in list(changes.items())[:4])
        more = f", and {len(changes) - 4} more" if len(changes) > 4 else ""
        yield finding(
            "model_changed_after_wrapping",
            f"{at} since the model was wrapped: {listed}{more}. {_shown(window)}",
            str(run.wrappers[0]["place"]) if run.wrappers else "",
            "Change the model first, then wrap it: DistributedDataParallel(model) comes last.",
        )
    if flags and flags[-1] is False:
        yield finding(
            "last_micro_batch_unsynced",
            f"{at} {len(fact['backwards'])} micro-batches, and the forward of the last one ran "
            f"under no_sync(). {_shown(window)}",
            fact["forwards"][-1]["place"] if fact["forwards"] else "",
            "Leave no_sync() for the last micro-batch: "
            "with model.no_sync() if k < K - 1 else nullcontext().",
        )
    if (inside := fact.get("stepped_in_backward")) is not None and not window.sharded:
        yield finding(
            "optimizer_in_backward",
            f"{at} optimizer.step() was called inside backward. {_shown(window)}",
            inside,
            "Step after backward() has returned, or reduce the gradient in the hook first.",
        )
    elif not {name.split(":")[-1] for name in window.differing_gradients} <= changes.keys():
        yield from _unprepared(run, window, at, fact)


def _shown(window: Window) -> str:
    """How many gradients differ."""
    names = window.differing_gradients
    total = len(window.first["snapshot"]["hashes"])
    return f"{len(names)} of {total} gradients differ between the ranks, first {names[0]}."


def _changes(window: Window) -> dict[str, str]:
    """What has changed of parameters whose gradients differ."""
    differing = {name.split(":")[-1] for name in window.differing_gradients}
    listed = [change for fact in window.facts for change in fact["changed"]]
    return {one["name"]: one["how"] for one in listed if one["name"] in differing}


def synchronized(fact: WindowFact) -> list[bool]:
    """For each backward that reached a wrapper: whether it was synchronized in the first one."""
    flags = []
    for backward in fact["backwards"]:
        for index, reached in backward.get("wrappers", {}).items():
            if reached and backward["prepared"].get(index) is not None:
                flags.append(bool(backward["prepared"][index]))
                break
    return flags


def _unprepared(run: Run, window: Window, at: str, fact: WindowFact) -> Iterator[Finding]:
    """A backward that no forward of a wrapper has prepared."""
    again, backward = _not_prepared(fact)
    gone = any(index < len(run.wrappers) for index in fact["gone"])
    if backward is None or (gone and not again):
        return
    terms = backward.get("terms") or ()
    where = terms[0]["place"] if terms else backward["place"]
    if again:
        yield finding(
            "two_backwards",
            f"{at} a second backward ran through the same forward. The wrapper averages once per "
            f"forward. {_shown(window)}",
            where,
            "Add the losses, and call backward once: (loss_1 + loss_2).backward().",
        )
        return
    manual = any(wrapper["manual"] for wrapper in run.wrappers)
    yield finding(
        "wrapper_bypassed",
        f"{at} backward reached the wrapped model, but no forward of the wrapper came before it. "
        f"{_shown(window)}",
        backward["place"] if manual else where,
        MANUAL_BACKWARD if manual else CALL_THE_WRAPPER,
    )


def _not_prepared(fact: WindowFact) -> tuple[bool, BackwardFact | None]:
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


def _lost(run: Run, windows: list[Window]) -> Iterator[Finding]:
    """In every observed step, no wrapper's forward prepared a backward, and no collective was of
    gradients or parameters.
    """
    facts = [fact for window in windows for fact in window.facts]
    backwards = [backward for fact in facts for backward in fact["backwards"]]
    if any(any(backward["prepared"].values()) for backward in backwards):
        return
    if any(fact["sharded"] or _touches_model(fact) for fact in facts):
        return
    made = [one["place"] for one in run.wrappers if one["index"] in facts[0]["gone"]]
    fix = "Train the parameters of what DistributedDataParallel returns, or wrap this model, too."
    if not backwards:
        why = "No backward() ran, so DistributedDataParallel averaged nothing."
        fix = "loss.backward(), or all-reduce and divide each gradient before optimizer.step()."
    elif made:
        why, fix = f"The wrapper made at {', '.join(made)} no longer exists.", KEEP_THE_WRAPPER
    elif not run.wrappers:
        why = "No wrapper and no collective of gradients was seen."
        fix = "model = DistributedDataParallel(model), and train what it returns."
    elif not any(n for backward in backwards for n in backward["wrappers"].values()):
        why = "Backward reached no parameter of a wrapped model."
    else:
        return
    shown = f"Step {windows[0].n}: {_shown(windows[0])} {why}"
    yield finding("wrapper_lost", shown, windows[0].first["step_place"], fix)


def _touches_model(fact: WindowFact) -> bool:
    return any(
        call.get("what") in ("gradient", "parameter", "flat", "like a gradient")
        or call.get("numel", 0) > 64
        for call in fact["collectives"]
        if not call["op"].endswith("barrier")
    )


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
        f"Step {window.n}: {len(ones)} all-reduces of parameters, as in every observed step; the "
        f"gradients are each rank's own"
        + (f", and so is the state of {optimizers[0]['type']}." if momentum else "."),
        ones[0]["place"],
        "All-reduce parameter.grad between backward() and step(), and leave the parameters alone.",
        None if momentum else "note",
    )


def _of_parameters(window: Window) -> list[CollectiveFact]:
    """The all-reduces of parameters. All in one tensor look like all gradients in one."""
    return [
        call
        for fact in window.facts
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
        sent = {rank: list(filter(reduces_gradient, fact["collectives"])) for rank, fact in window}
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


@rule("other_than_average")
def other_than_average(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """What an optimizer gets is no multiple of the sum of all that the ranks' backwards computed.

    Measured for parameters of fully_shard, and where the script reduces a gradient more often than
    once per step. Right if the script, a hook, or a compression changes gradients on purpose: what
    backward leaves is then not what the optimizer gets, or was reduced once.
    """
    found = []
    for step in steps:
        if step.combination.kind != "no multiple":
            continue
        for fact in step.window.facts:
            calls = list(filter(reduces_gradient, fact["collectives"]))
            moments = {str(call["backwards"]) for call in calls}
            often = Counter(call.get("name", "") for call in calls).most_common(1)
            again = (calls[0], *often[0]) if often and often[0][1] > 1 < len(moments) else None
            if again or (fact["snapshot"]["pieces"] and untouched(fact)):
                found.append((step, fact, again))
                break
    if not found or 2 * len(found) < len(steps):
        return
    step, fact, again = found[0]
    said = f"{again[1]} is all-reduced {again[2]} times in this step. " if again else ""
    yield finding(
        "other_than_average",
        f"Step {step.window.n}: {said}What the optimizer gets is no multiple of the sum of what "
        f"the ranks' backwards computed. Seen in {len(found)} of {len(steps)} observed steps.",
        again[0]["place"] if again else fact["step_place"],
        "Reduce each gradient once per step, after the last micro-batch's backward.",
    )


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
        if not all(map(_without_gradient, windows[-2:])) or _moves(run, windows[-2:]):
            continue
        window = windows[-1]
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
            + (f" {fact['outside']} others have one." if fact["outside"] else ""),
            fact["step_place"],
            fix,
        )
        return


def _moves(run: Run, windows: list[Window]) -> bool:
    """Whether the last step, which has no gradients, changes the parameters."""
    before = {rank.rank: rank.start["parameters"] for rank in run.ranks if rank.start}
    for window in windows[:-1]:
        before |= {rank: fact["after"]["parameters"] for rank, fact in window}
    return any(
        before.get(rank, {}).get(name, held) != held
        for rank, fact in windows[-1]
        for name, held in fact["after"]["parameters"].items()
    )


def _without_gradient(window: Window) -> bool:
    """Whether no rank's optimizer has a gradient, though it could have some."""
    could = any(fact["outside"] or fact["snapshot"]["missing"] for fact in window.facts)
    return could and not window.skipped and not window.trains
