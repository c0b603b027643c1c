"""Losses over pairs of samples: which samples each rank compares, and what carries a gradient."""

from collections.abc import Iterator

from ddp_doctor.explain.findings import Finding, Prediction, finding, rule
from ddp_doctor.explain.numbers import near
from ddp_doctor.explain.steps import Step
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import CollectiveFact, TermFact, WindowFact

GATHER = (
    "features = torch.cat(torch.distributed.nn.functional.all_gather(features)). Where torch "
    "deprecates that: all_gather_tensor_autograd of torch.distributed._functional_collectives."
)
NOT_EQUAL = Prediction("another gradient")


@rule("local_negatives", "gather_without_gradient")
def contrastive(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """A loss over pairs sees only this rank's samples, or other ranks' without gradient.

    Right in one process, and if a gather that carries gradient (torch.distributed.nn) brings the
    other ranks' features. Right too if each rank's rows are multiplied by W to make up for the
    missing paths, and if only the samples of one rank are meant to be compared.
    """
    always = len(steps) > 1 and all(_contrasting(fact) for s in steps for fact in s.window.facts)
    for step in steps if run.world > 1 else ():
        for fact in step.window.facts:
            term = _contrasting(fact)
            if found := _unknown_loss(step.window.n, fact):
                yield found
                return
            square = term.get("square") if term is not None else None
            if term is None or not square or not (square[2] or always):
                continue
            rows, columns, _ = square
            if found := _gathered(step.window.n, fact, term, rows, columns, run.world):
                yield found
                return


def _gathered(
    n: int, fact: WindowFact, term: TermFact, rows: int, columns: int, world: int
) -> Finding | None:
    """What is missing in the comparison of `rows` with `columns` samples."""
    gathers = gathers_of(fact)
    if carried := [call for call in gathers if call["through_autograd"]]:
        if any(call["through_autograd"] and call["in_backward"] for call in fact["collectives"]):
            return None
        return finding(
            "gather_without_gradient",
            f"Step {n}: {carried[0]['op']} in an autograd.Function whose backward calls no "
            f"collective: what the other ranks' losses say of this rank's features is lost.",
            carried[0]["place"],
            GATHER,
            "note",
            NOT_EQUAL,
        )
    own = term.get("shape")  # its scores are no features
    plain = [c for c in gathers if c.get("shape") != own and _brings(c, columns, world)]
    if plain and not _times_world(fact, term, world):
        return finding(
            "gather_without_gradient",
            f"Step {n}: the loss compares {rows} with {columns} samples, gathered by "
            f"{plain[0]['op']}, which carries no gradient: every path through the other ranks' "
            f"features is missing.",
            plain[0]["place"],
            GATHER,
            predicts=NOT_EQUAL,
        )
    if not plain and rows == columns and _rows_are_local(fact, rows):
        return finding(
            "local_negatives",
            f"Step {n}: each rank's loss compares its own {rows} samples only. One process would "
            f"compare {rows * world}.",
            term["place"],
            GATHER,
            predicts=NOT_EQUAL,
        )
    return None


def _unknown_loss(n: int, fact: WindowFact) -> Finding | None:
    """A plain gather of activations, where no known function is the loss: it may be for a log."""
    terms = [term for backward in fact["backwards"] for term in backward.get("terms", ())]
    gathers = gathers_of(fact)
    cut = [call for call in gathers if call.get("what") == "activation" and call.get("grad")]
    known = any(term["loss"] for term in terms) or any(c["through_autograd"] for c in gathers)
    if known or not cut:
        return None
    return finding(
        "gather_without_gradient",
        f"Step {n}: {cut[0]['op']} gathers outputs and carries no gradient. If the loss uses them, "
        f"every path through the other ranks' features is missing.",
        cut[0]["place"],
        GATHER,
        "note",
    )


def _contrasting(fact: WindowFact) -> TermFact | None:
    """The last loss in which every row has a target of its own; a batch of classes may look alike.

    So in each of several steps.
    """
    terms = [term for backward in fact["backwards"] for term in backward.get("terms", ())]
    return next((term for term in reversed(terms) if term.get("square")), None)


def gathers_of(fact: WindowFact) -> list[CollectiveFact]:
    """All-gathers of more than vectors: those are SyncBatchNorm's statistics, through autograd."""
    return [
        call
        for call in fact["collectives"]
        if call["op"].startswith("all_gather") and len(call.get("shape", ())) > 1
    ]


def _brings(call: CollectiveFact, columns: int, world: int) -> bool:
    """Whether the columns are what one gather brings, or two gathers of as much each."""
    first = call.get("shape", [0])[0]
    return columns in (first, first * world, 2 * first * world)


def _times_world(fact: WindowFact, term: TermFact, world: int) -> bool:
    factors = [each["value"] for each in fact["scaling"] if each["op"] == "*"]
    return any(near(factor, world) for factor in (abs(term["factor"]), *factors))


def _rows_are_local(fact: WindowFact, rows: int) -> bool:
    """Whether the compared samples are the ones this rank's forward was given."""
    inputs = [shape for group in fact["inputs"] for _, _, shape in group]
    return not inputs or any(shape and shape[0] in (rows, 2 * rows) for shape in inputs)
