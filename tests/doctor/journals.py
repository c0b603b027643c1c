"""Journals of runs that never ran: what each rank would have written, from a few numbers."""

from collections.abc import Mapping
from copy import copy, deepcopy
from typing import Any, NotRequired, TypeVar, cast, get_origin, get_type_hints

from torch import Tensor

from ddp_doctor.explain.findings import Finding
from ddp_doctor.explain.observed import observed
from ddp_doctor.explain.rules import examine
from ddp_doctor.explain.steps import Step, steps_of
from ddp_doctor.facts.fingerprints import projection
from ddp_doctor.facts.journal import ProcessJournal, Status
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import (
    BackwardFact,
    EndFact,
    Facts,
    GroupFact,
    ProcessFact,
    Projections,
    ReplicaFact,
    SnapshotFact,
    TermFact,
    TotalsFact,
    WindowFact,
    no_facts,
)

SAME = {"weight": 1.5, "bias": -2.0}
OWN = [{"weight": 1.0, "bias": -1.5}, {"weight": 2.0, "bias": -2.5}]


EMPTY = {int: 0, float: 0.0, str: "", bool: False, list: [], dict: {}}
T = TypeVar("T")


def fact(kind: type[T], /, **given: Any) -> T:
    """A fact of this type. What is not given is empty; a field that the type lacks is refused."""
    hints = get_type_hints(kind, include_extras=True)
    assert given.keys() <= hints.keys(), f"{kind.__name__} has no {given.keys() - hints.keys()}"
    blank = {
        name: copy(EMPTY.get(get_origin(hint) or hint))  # None where None is allowed
        for name, hint in hints.items()
        if get_origin(hint) is not NotRequired
    }
    return cast(T, blank | given)


def with_backward(one: WindowFact, **given: Any) -> None:
    """Change the first backward of a window."""
    one["backwards"][0] = fact(BackwardFact, **{**one["backwards"][0], **given})


def numbers(tensor: Tensor) -> list[float]:
    """Its projection, as a rank writes it down."""
    found = projection(tensor)
    assert found is not None
    return found.tolist()


def projections(given: Mapping[str, float | list[float]]) -> Projections:
    """Of tensors with four equal elements, if only one is given."""
    return {name: one if isinstance(one, list) else [one] * 4 for name, one in given.items()}


def window(
    counts: list[int],
    shares: list[float],
    gradients: Mapping[str, float | list[float]],
    local: Mapping[str, float | list[float]],
    **more: Any,
) -> WindowFact:
    """One rank's record of one step with a micro-batch per count."""
    backwards = [
        fact(
            BackwardFact,
            place="train.py:9",
            scale=1.0,
            prepared={"0": True},
            wrappers={"0": len(gradients)},
            values=[1.0],
            terms=[
                fact(
                    TermFact,
                    function="cross_entropy",
                    reduction="mean",
                    count=count,
                    rows=count,
                    place="train.py:8",
                    loss=True,
                    factor=share,
                )
            ],
        )
        for count, share in zip(counts, shares, strict=True)
    ]
    grads = projections(gradients)
    hashes = {name: hash(str(value)) for name, value in gradients.items()}
    given = {
        "backwards": backwards,
        "snapshot": fact(SnapshotFact, grads=grads, hashes=hashes, local=projections(local)),
        "after": fact(ReplicaFact),
        "step_place": "train.py:10",
        "world": 0,
    }
    return fact(WindowFact, **{**given, **more})


def journal_of(rank: int, world: int, now: Status, **facts: Any) -> ProcessJournal:
    """What one rank's journal holds: `facts` by kind."""
    here = no_facts()
    here["process"] = [fact(ProcessFact)]
    here["group"] = [GroupFact(rank=rank, world=world)]
    assert facts.keys() <= here.keys()
    here.update(cast(Facts, facts))
    return ProcessJournal(f"host-{rank}", here, now)


def run_of(windows: list[WindowFact], **facts: Any) -> Run:
    """A run with one window per rank. `facts`, by kind, are in every rank's journal."""
    journals = []
    for rank, one in enumerate(windows):
        kinds = {
            "window": [one | {"world": one["world"] or len(windows)}],
            "totals": [fact(TotalsFact, steps={"0": 1})],
            "end": [fact(EndFact)],
        }
        now = Status(0.0, 1, True, "ended")
        journals.append(journal_of(rank, len(windows), now, **deepcopy(kinds | facts)))
    return Run.of(journals)


def findings(run: Run) -> dict[str, Finding]:
    found = {each.code: each for each in examine(run, steps_of(run))}
    assert not run.unchecked, run.unchecked  # a rule that fails says so here
    return found


def lines(run: Run) -> dict[str, str]:
    """What is said to be measured, by name."""
    return {line.name: line.text for line in observed(run, steps_of(run)).lines}


def kinds(run: Run) -> list[str]:
    """How each step combined the ranks."""
    return [step.combination.kind for step in steps_of(run)]


def first_step(run: Run) -> Step:
    return steps_of(run)[0]


def run_with_steps(steps: list[list[WindowFact]], **facts: Any) -> Run:
    """A run of several steps: for each step, one window per rank."""
    run = run_of(steps[0], **facts)
    for number, windows in enumerate(steps[1:], start=1):
        for rank, one in zip(run.ranks, windows, strict=True):
            world = one["world"] or len(windows)
            rank.facts["window"].append({**one, "n": number, "world": world})
    return run


def step(**more: Any) -> list[WindowFact]:
    """One right step on two ranks; a tuple in `more` holds one value per rank."""
    windows = []
    for rank, mine in enumerate(OWN):
        own = {key: one[rank] if isinstance(one, tuple) else one for key, one in more.items()}
        windows.append(window([4], [1.0], SAME, mine, **own))
        with_backward(windows[-1], values=[1.0 + rank])
    return windows
