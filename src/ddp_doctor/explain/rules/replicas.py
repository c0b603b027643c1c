"""Replicas: the parameters and buffers of all ranks are meant to be equal."""

from collections.abc import Iterator

from ddp_doctor.explain.findings import Finding, finding, rule
from ddp_doctor.explain.steps import Step
from ddp_doctor.facts.merged import Run, Window
from ddp_doctor.facts.types import SettingsFact

SMALL = 1e-6
APPLY_ALIKE = (
    "Let every rank apply the same gradient: through the wrapper, or an all-reduce of every "
    "gradient before optimizer.step()."
)
CHANGE_ALIKE = (
    "The gradients were equal on the ranks: look for what else changes parameters, such as noise, "
    "a learning rate, or state of an optimizer that each rank has of its own."
)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm


def _replicas(run: Run) -> bool:
    """Whether it was seen which ranks are meant to hold the same parameters."""
    return run.world > 1 and not run.in_groups and bool(run.copies)


@rule("replicas_differ_at_start")
def differ_at_start(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Parameters differ between the ranks before the first optimizer step.

    A wrapper broadcasts rank 0's parameters. Right for models, or parts of one, that are different
    on purpose: tensor or pipeline parallelism, experts. Ranks with copies of a parameter step with
    the same gradient.
    """
    names = list(run.copies) if _replicas(run) else []
    differing = [name for name in names if not _equal_at_start(run, name)]
    if differing:
        values = [rank.start["values"] for rank in run.ranks if rank.start]
        off = max(_spread([of.get(name) for of in values]) for name in differing)
        window = run.complete[0] if run.complete else None
        yield finding(
            "replicas_differ_at_start",
            f"Before their first step {len(differing)} of {len(names)} parameters differ "
            f"between the ranks, first {differing[0]}" + (", by rounding." if off < SMALL else "."),
            window.first["step_place"] if window else "",
            "Seed every rank alike before the model is built, or broadcast rank 0's parameters: "
            "for p in model.parameters(): dist.broadcast(p.data, src=0).",
            "note" if off < SMALL else None,
        )


def _equal_at_start(run: Run, name: str) -> bool:
    """Whether the ranks with a copy held the same bits before the first step."""
    starts = {rank.rank: rank.start["parameters"] for rank in run.ranks if rank.start}
    return all(len({starts[rank].get(name) for rank in of}) == 1 for of in run.copies[name])


@rule("hyperparameters_differ")
def hyperparameters_differ(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """In some step the ranks' optimizers have other numbers: learning rates, weight decay.

    Right if the ranks train models, or parts of one, of their own.
    """
    if not _replicas(run) or run.split or len(run.ranks) < run.world:
        return
    changes = [[f for f in rank.facts["settings"] if f["optimizer"] == 0] for rank in run.ranks]
    last = min(rank.steps for rank in run.ranks)
    for step in sorted({fact["n"] for facts in changes for fact in facts}):
        first, *others = [_settings_at(step, facts) for facts in changes]
        if step >= last or first is None or None in others:
            return
        for rank, groups in enumerate(others, start=1):
            differing = [
                (name, value, its[name])
                for mine, its in zip(first, groups or (), strict=False)
                for name, value in mine.items()
                if its.get(name, value) != value
            ]
            if not differing:
                continue
            name, ours, other = differing[0]
            schedules = [fact for one in run.ranks for fact in one.facts["schedule"]]
            places = [fact["step_place"] for one in run.ranks for fact in one.windows]
            places += [fact["place"] for fact in schedules]
            yield finding(
                "hyperparameters_differ",
                f"Step {step}: {name} is {ours:.6g} on rank 0 and {other:.6g} on rank "
                f"{rank}. The same gradient then changes the replicas differently.",
                next((at for at in reversed(places) if at), ""),
                "Let every rank step the scheduler alike."
                if schedules
                else "Compute it from numbers that all ranks have in common, such as the step.",
            )
            return


def _settings_at(step: int, changes: list[SettingsFact]) -> list[dict[str, float]] | None:
    """Each group's hyperparameters at a step; None if they were no longer written down."""
    if not changes or (changes[-1]["full"] and step > changes[-1]["n"]):
        return None
    return next((f["groups"] for f in reversed(changes) if f["n"] <= step), None)


@rule("replicas_drift")
def drift(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Parameters that were equal at the start differ after some step.

    Right for local SGD, which lets them differ and averages them; and for ranks whose gradients
    nothing combines, or whose learning rates or loss scales differ, which other rules name. Right
    for parts of a model that start alike: zero biases.
    """
    if not _replicas(run) or run.averages_parameters or run.differing_scales:
        return
    if next(hyperparameters_differ(run, steps), None) is not None:
        return
    equal = {name for name in run.copies if _equal_at_start(run, name)}
    for window in run.complete:
        fact = window.first
        names = [name for name in window.differing_parameters if name in equal]
        of_no_model = [name for name in names if name.startswith("parameter ")]
        if not names or (fact["optimizer"] and names == of_no_model):
            continue  # each rank may have a tensor of its own to optimize
        its = [each for each in run.complete if each.optimizer == window.optimizer]
        if any(later.n > window.n and not later.differing_parameters for later in its):
            return  # they are averaged again
        last = its[-1]
        apart = max(_distance(window, names), _distance(last, names))
        yield finding(
            "replicas_drift",
            f"After step {window.n}, {len(names)} parameters differ between the ranks, first "
            f"{names[0]}. They were equal at the start.",
            fact["step_place"],
            APPLY_ALIKE if window.differing_gradients else CHANGE_ALIKE,
            None if apart > SMALL else "note",
        )
        return


def _distance(window: Window, names: list[str]) -> float:
    """The largest relative difference of a parameter's projection between two ranks."""
    spreads = [
        _spread([window.ranks[rank]["after"]["values"].get(name) for rank in group])
        for name in names
        for group in window.groups(name)
    ]
    return max(spreads, default=0.0)


def _spread(values: list[float | None]) -> float:
    """The largest relative difference of two values."""
    found = [value for value in values if value is not None]
    return (max(found) - min(found)) / (1e-12 + max(map(abs, found))) if found else 0.0


@rule("buffers_differ")
def buffers_differ(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Buffers that are saved with the model differ between the ranks after a step.

    Right with DDP's broadcast_buffers=True for batch norm: each forward overwrites the statistics
    with rank 0's, an estimate from fewer samples. A codebook or a queue then learns from rank 0's
    samples only: a hint. Without it, each rank evaluates another model.
    """
    if not _replicas(run) or not run.complete or run.split:
        return
    window = run.complete[-1]
    names = window.differing_buffers
    broadcast = bool(run.wrappers) and all(one["broadcast_buffers"] for one in run.wrappers)
    if broadcast:
        names = [name for name in names if not name.endswith(STATISTICS)]
    if not names:
        return
    fact = window.first
    why = "The wrapper does not broadcast them." if run.wrappers else "No wrapper broadcasts them."
    if broadcast:
        why = "Each forward overwrites them with rank 0's: what other ranks added is lost."
    first = next(each for each in run.complete if set(names) & set(each.differing_buffers))
    yield finding(
        "buffers_differ",
        f"After step {window.n}, {len(names)} buffers differ between the ranks, first {names[0]}, "
        f"since step {first.n}. {why}",
        str(run.wrappers[0]["place"] if run.wrappers else fact["step_place"]),
        "All-reduce what updates them, so that all ranks compute the same; for batch norm, leave "
        "broadcast_buffers at True or convert to SyncBatchNorm.",
        "hint" if broadcast else None,
    )
