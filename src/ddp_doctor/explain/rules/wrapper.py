"""The wrapper: whether the gradients pass through what combines them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from ddp_doctor.explain.equation import Equation
from ddp_doctor.explain.findings import DATA, Finding, finding
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


def wrapper_bypassed(run: Run, equation: Equation) -> Iterator[Finding]:
    """Backward reaches a wrapped model that no forward has prepared, or a second time.

    The wrapper averages gradients once per forward that is called on it.

    Right if the gradients are combined in another way: they are equal on all ranks then. A backward
    under no_sync is prepared, and is another rule's subject. Right too for local SGD, which
    averages the parameters, and for parts of a model: the schedule of a pipeline calls its stage
    inside the wrapper.
    """
    if run.world < 2 or not run.wrappers or run.averages_parameters or run.in_groups:
        return
    for window in run.complete:
        names = window.differing_gradients
        if not names or _changed(window, names):
            continue
        for rank, fact in window:
            again, backward = _unprepared(fact)
            if backward is not None:
                differ = (
                    f"{len(names)} of {_total(fact)} gradients differ between the ranks, first "
                    f"{names[0]}."
                )
                at = f"Step {window.n}, rank {rank}"
                yield (_again if again else _bypassed)(run, fact, backward, at, differ)
                return


def _again(run: Run, fact: WindowFact, backward: BackwardFact, at: str, differ: str) -> Finding:
    return finding(
        "two_backwards",
        f"{at}: a second backward ran through the same forward. The wrapper averages gradients "
        f"once per forward, so those of the second backward are never averaged. {differ}",
        _place(backward),
        "Add the losses, and call backward once: (loss_1 + loss_2).backward().",
    )


def _bypassed(run: Run, fact: WindowFact, backward: BackwardFact, at: str, differ: str) -> Finding:
    gone = [run.wrappers[each] for each in fact["gone"] if each < len(run.wrappers)]
    longer = f", which no longer exists (made at {gone[0]['place']})" if gone else ""
    went = f"no forward went through the wrapper{longer}"
    fix = KEEP_THE_WRAPPER if gone else CALL_THE_WRAPPER
    if any(wrapper["manual"] for wrapper in run.wrappers):
        went, fix = "nothing has prepared the wrapper for it", MANUAL_BACKWARD
    return finding(
        "wrapper_lost" if gone else "wrapper_bypassed",
        f"{at}: backward reached the wrapped model, but {went}. {differ}",
        backward["place"] if fix is MANUAL_BACKWARD else _place(backward),
        fix,
    )


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


def _changed(window: Window, differing: list[str]) -> bool:
    """Whether changes of the model after wrapping explain every gradient that differs."""
    changed = {change["name"] for _, fact in window for change in fact["changed"]}
    return bool(changed) and {name.split(":")[-1] for name in differing} <= changed


def _place(backward: BackwardFact) -> str:
    terms = backward.get("terms") or ()
    return terms[0]["place"] if terms else backward["place"]


def _total(fact: WindowFact) -> int:
    return len(fact["snapshot"]["hashes"])


def wrapper_lost(run: Run, equation: Equation) -> Iterator[Finding]:
    """Several ranks train without any wrapper, and nothing combines their gradients.

    Right if an all-reduce of one's own makes the gradients equal, and if parameters are averaged
    from time to time (local SGD). Right too if the ranks' models are different on purpose: those do
    not start from the same weights.
    """
    differing = [window for window in run.complete if window.differing_gradients]
    if run.world < 2 or not differing or len(differing) < len(run.complete):
        return
    if run.averages_parameters or run.models_differ or any(w.sharded for w in run.windows):
        return
    window = differing[0]
    facts = [fact for _, fact in window]
    everywhere = [fact for each in run.complete for _, fact in each]
    reached = any(n for fact in facts for b in fact["backwards"] for n in b["wrappers"].values())
    in_backward = any("stepped_in_backward" in fact for fact in facts)
    if reached or in_backward or any(_touches_model(fact) for fact in everywhere):
        return
    where = facts[0]["step_place"]
    other = " The wrapper that was made is around other parameters." if run.wrappers else ""
    yield finding(
        "wrapper_lost",
        f"Step {window.n}: {run.world} ranks step with gradients that differ "
        f"({len(window.differing_gradients)} of {_total(facts[0])}), and nothing combines "
        f"them.{other}",
        where,
        "model = DistributedDataParallel(model), and train what it returns.",
    )


def _touches_model(fact: WindowFact) -> bool:
    return any(
        call.get("what") in ("gradient", "parameter", "flat", "like a gradient")
        or call.get("numel", 0) > 64
        for call in fact["collectives"]
        if not call["op"].endswith("barrier")
    )


def changed_after_wrapping(run: Run, equation: Equation) -> Iterator[Finding]:
    """Parameters are new, unfrozen, converted, replaced or moved since the model was wrapped.

    Right if a hook or an all-reduce of one's own makes their gradients equal, and for parameters
    that are frozen or that no optimizer trains.
    """
    if run.world < 2:
        return
    for window in run.complete:
        differing = {name.split(":")[-1] for name in window.differing_gradients}
        changes: dict[str, str] = {}
        for _, fact in window:
            for change in fact["changed"]:
                if change["name"] in differing:
                    changes.setdefault(change["name"], change["how"])
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


def optimizer_on_other_parameters(run: Run, equation: Equation) -> Iterator[Finding]:
    """The optimizer steps parameters that backward never reaches, or misses some that it reaches.

    Right if another optimizer of the process holds the rest (GANs), and for parameters that are
    frozen by leaving them out of the optimizer in some steps only. Right if some steps have no
    backward, because their batches have no labels, and if the parameters move all the same: then
    their gradients are elsewhere.
    """
    for optimizer in dict.fromkeys(window.optimizer for window in run.windows):
        windows = [window for window in run.windows if window.optimizer == optimizer]
        last = list(takewhile(_without_gradient, reversed(windows)))
        if len(last) >= min(2, len(windows)) and not _moves(run, windows, last):
            yield _without_any(last[-1])
            return
    outside = [
        [(window.n, rank, fact) for rank, fact in window if fact["stale"]["outside"]]
        for window in run.complete
        if not window.sharded
    ]
    if outside and all(outside):
        n, rank, fact = outside[0][0]
        yield finding(
            "optimizer_on_other_parameters",
            f"Step {n}, rank {rank}: backward gives gradients to {fact['stale']['outside']} "
            f"parameters of the wrapped model that no optimizer holds.",
            fact["step_place"],
            "Pass all trained parameters to the optimizer, or freeze the others: "
            "parameter.requires_grad_(False).",
            "note",
        )


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


def _without_any(window: Window) -> Finding:
    rank, fact = next(iter(window))
    fix = (
        "Create the optimizer from the parameters of the model that is trained, after wrapping, "
        "sharding, or moving it."
    )
    if window.sharded:
        fix = (
            "Call set_requires_gradient_sync(True), and set_requires_all_reduce(True) with "
            "replicas, before the forward of the last micro-batch."
        )
    return finding(
        "optimizer_on_other_parameters",
        f"Step {window.n}, rank {rank}: none of the optimizer's parameters has a gradient. "
        f"Backward reached {fact['stale']['anywhere']} tracked parameters; "
        f"{fact['stale']['outside']} of them are in no optimizer.",
        fact["step_place"],
        fix,
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


def optimizer_in_backward(run: Run, equation: Equation) -> Iterator[Finding]:
    """The optimizer steps from a hook, while backward is still running.

    Correct with one rank, if the script has reduced every gradient before the step, and with
    sharded parameters: their gradients are reduced before such hooks run.
    """
    if run.world < 2:
        return
    for window in run.windows:
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


def parameters_averaged(run: Run, equation: Equation) -> Iterator[Finding]:
    """Parameters, not gradients, are all-reduced in every step.

    Right for local SGD, which averages every few steps: at least one observed step without it. With
    SGD without momentum it equals averaging the gradients: a note.
    """
    if run.world < 2 or len(run.complete) < 2:
        return
    hits = []
    for window in run.complete:
        ones = [
            call
            for _, fact in window
            for call in fact["collectives"]
            if call["op"] == "all_reduce" and _parameters(call, window)
        ]
        hits.append((window, ones))
    # The all-reduce after step n is seen in the window of step n + 1.
    later = hits[1:]
    if not all(ones for _, ones in later):
        return
    if not all(window.differing_gradients for window, _ in later):
        return
    window, ones = later[0]
    optimizers = [fact for rank in run.ranks for fact in rank.facts["optimizer"]]
    name = optimizers[0]["type"] if optimizers else "The optimizer"
    yield finding(
        "parameters_averaged",
        f"Step {window.n}: {len(ones)} all-reduces of parameters in every step; the gradients are "
        f"each rank's own. {name} updates its state from local "
        f"gradients, so this is not the step of the averaged gradient.",
        ones[0]["place"],
        "All-reduce parameter.grad between backward() and step(), and leave the parameters alone.",
        None if optimizers and optimizers[0]["momentum"] else "note",
    )


def _split_twice(world: int, place: str) -> Finding:
    twice = finding(
        "world_size_one",
        f"Two samplers, one inside of the other, split the data over {world} ranks each: a rank "
        f"reads 1/{world**2} of them, and 1/{world} of the data are all that is trained on.",
        place,
        "Leave one of the two out: accelerate's prepare() splits what its loader yields, so that "
        "loader needs no DistributedSampler.",
        "hint",
    )
    return replace(twice, title="The data are split over the ranks twice", page=DATA)


def _parameters(call: CollectiveFact, window: Window) -> bool:
    """Whether a collective is of parameters. All in one tensor look like all gradients in one."""
    flat = call.get("what") == "flat" and so_far(call, window) == 0
    return flat or call.get("what") == "parameter"


def world_size_one(run: Run, equation: Equation) -> Iterator[Finding]:
    """A process believes that it is one of several ranks, but its process group has one.

    Signs: the environment's WORLD_SIZE, or a sampler that splits the data over more replicas than
    the group has ranks. Right if the sampler's replicas are the ranks of the run. If two samplers
    split the data over the ranks, one after the other, a hint says so.
    """
    for rank in run.ranks:
        groups = rank.facts["group"]
        world = groups[-1]["world"] if groups else 1
        samplers = [
            (fact["replicas"], fact["place"])
            for fact in (*rank.facts["sampler"], *rank.facts["loader"])
            if (fact["replicas"] or 0) > world
        ]
        if samplers:
            replicas, place = samplers[-1]
            if replicas == world**2 > 1:
                yield _split_twice(world, place)
                return
            left = rank.process["environment"].get("LOCAL_RANK")
            yield finding(
                "world_size_one",
                f"Rank {rank.rank}: the sampler gives this process 1/{replicas} of the data, but "
                f"its process group has {world} rank{'s' * (world != 1)}. The other parts are "
                f"never trained on."
                + (f" LOCAL_RANK={left} was in the environment." if left is not None else ""),
                place,
                "Start all ranks (torchrun, or devices=N in a fresh process). If an earlier run in "
                "this process set LOCAL_RANK, run the second one in its own process.",
            )
            return
    environment = run.ranks[0].process["environment"] if run.ranks else {}
    claimed = int(environment.get("WORLD_SIZE", "1") or 1)
    if claimed > 1 and run.world == 1 and run.ranks[0].windows:
        yield finding(
            "world_size_one",
            f"The environment says WORLD_SIZE={claimed}, but the process joined no group of that "
            f"size: each of the {claimed} processes trains alone.",
            run.ranks[0].windows[0]["step_place"],
            "Call dist.init_process_group() and wrap the model before training.",
        )


RULES = (
    world_size_one,
    changed_after_wrapping,
    wrapper_bypassed,
    optimizer_in_backward,
    parameters_averaged,
    optimizer_on_other_parameters,
    wrapper_lost,
)
