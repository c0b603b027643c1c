"""Losses over pairs of samples: which samples each rank compares, and what carries a gradient."""

from collections.abc import Iterator

from ddp_doctor.explain.equation import Equation
from ddp_doctor.explain.findings import Finding, finding
from ddp_doctor.explain.numbers import near
from ddp_doctor.facts.merged import Run, Window
from ddp_doctor.facts.types import CollectiveFact, TermFact, WindowFact

GATHER = (
    "features = torch.cat(torch.distributed.nn.functional.all_gather(features)). Where torch "
    "deprecates that: all_gather_tensor_autograd of torch.distributed._functional_collectives."
)


def contrastive(run: Run, equation: Equation) -> Iterator[Finding]:
    """A loss over pairs sees only this rank's samples, or other ranks' without gradient.

    Right in one process, and if a gather that carries gradient (torch.distributed.nn) brings the
    other ranks' features. Right too if each rank's rows are multiplied by W to make up for the
    missing paths.
    """
    for window in run.complete if run.world > 1 else ():
        for _, fact in window:
            term = _contrasting(fact)
            square = term.get("square") if term is not None else None
            if term is None or not square or not (square[2] or _always_contrasts(run)):
                continue
            rows, columns, _ = square
            gathers = gathers_of(fact)
            if carried := [call for call in gathers if call["through_autograd"]]:
                if not any(map(_in_backward_of_a_function, fact["collectives"])):
                    yield _own_slice(window, carried[0])
                    return
                continue
            own = term.get("shape")  # its scores are no features
            others = [call for call in gathers if call.get("shape") != own]
            plain = [call for call in others if _brings(call, columns, run.world)]
            if plain and not _times_world(fact, term, run.world):
                yield finding(
                    "gather_without_gradient",
                    f"Step {window.n}: the loss compares {rows} with {columns} samples, gathered "
                    f"by {plain[0]['op']}, which carries no gradient: every path through the other "
                    f"ranks' features is missing.",
                    plain[0]["place"],
                    GATHER,
                )
                return
            if not plain and rows == columns and _rows_are_local(fact, rows):
                yield finding(
                    "local_negatives",
                    f"Step {window.n}: each rank's loss compares its own {rows} samples only. One "
                    f"process would compare {rows * run.world}.",
                    term["place"],
                    GATHER,
                )
                return


def _in_backward_of_a_function(call: CollectiveFact) -> bool:
    return bool(call["through_autograd"] and call["in_backward"])


def _own_slice(window: Window, gather: CollectiveFact) -> Finding:
    return finding(
        "gather_without_gradient",
        f"Step {window.n}: {gather['op']} in an autograd.Function whose backward calls no "
        f"collective: it keeps what this rank's loss says of this rank's features, and loses what "
        f"the other ranks' losses say of them. Unless it multiplies by {window.world}, gradients "
        f"are 1/{window.world} of what they should be.",
        gather["place"],
        GATHER,
        "note",
    )


def _contrasting(fact: WindowFact) -> TermFact | None:
    """The last loss in which every row has a target of its own."""
    terms = [term for backward in fact["backwards"] for term in backward.get("terms", ())]
    return next((term for term in reversed(terms) if term.get("square")), None)


def _always_contrasts(run: Run) -> bool:
    """Whether there was such a loss in each of several steps: a batch of classes may look alike."""
    facts = [fact for window in run.complete for _, fact in window]
    return len(run.complete) > 1 and all(_contrasting(fact) for fact in facts)


def gathers_of(fact: WindowFact) -> list[CollectiveFact]:
    """All-gathers of more than vectors: those are SyncBatchNorm's statistics, through autograd."""
    return [
        call
        for call in fact["collectives"]
        if call["op"].startswith("all_gather") and len(call.get("shape", ())) > 1
    ]


def _brings(call: CollectiveFact, columns: int, world: int) -> bool:
    """Whether the columns are what one gather brings, or two gathers of as much each."""
    first = call["shape"][0]
    return columns in (first, first * world, 2 * first * world)


def _times_world(fact: WindowFact, term: TermFact, world: int) -> bool:
    factors = [each["value"] for each in fact["scaling"] if each["op"] == "*"]
    return any(near(factor, world) for factor in (abs(term["factor"]), *factors))


def _rows_are_local(fact: WindowFact, rows: int) -> bool:
    """Whether the compared samples are the ones this rank's forward was given."""
    inputs = [shape for group in fact["inputs"] for _, _, shape in group]
    return not inputs or any(shape and shape[0] in (rows, 2 * rows) for shape in inputs)


RULES = (contrastive,)
