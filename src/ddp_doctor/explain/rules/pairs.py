"""Losses over pairs of samples: whether the features that a loss compares carry a gradient."""

from collections.abc import Iterator

from ddp_doctor.explain.findings import Finding, Prediction, finding, rule
from ddp_doctor.explain.numbers import near
from ddp_doctor.explain.steps import Step
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import CollectiveFact, TermFact, WindowFact

GATHER = (
    "features = torch.cat(torch.distributed.nn.functional.all_gather(features)). Where torch "
    "deprecates that: all_gather_tensor_autograd of torch.distributed._functional_collectives. Or, "
    "if each rank computes the loss of all rows, multiply it by dist.get_world_size()."
)


@rule("gather_without_gradient")
def gather_without_gradient(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """A loss over pairs compares samples of other ranks, whose features carry no gradient.

    Right if each rank's rows are multiplied by W to make up for the missing paths.
    """
    facts = [(step.window.n, fact) for step in steps for fact in step.window.facts]
    always = len(steps) > 1 and all(_contrasting(fact) for _, fact in facts)
    for n, fact in facts if run.world > 1 else ():
        term = _contrasting(fact)
        square = term.get("square") if term is not None else None
        # A batch of classes may look alike; its targets are rarely in an order, or so every time.
        if term is None or not square or not (square[2] or always):
            continue
        rows, columns, _ = square
        gathers = gathers_of(fact)
        if any(call["through_autograd"] for call in gathers) or _times_world(fact, term, run.world):
            continue
        scores = term.get("shape")  # gathered for a metric
        plain = [
            call
            for call in gathers
            if call.get("shape") != scores and _brings(call, columns, run.world)
        ]
        if plain:
            yield finding(
                "gather_without_gradient",
                f"Step {n}: the loss compares {rows} rows of features with {columns}, gathered by "
                f"{plain[0]['op']}, which carries no gradient: on each rank, the paths through the "
                f"other ranks' features are missing.",
                plain[0]["place"],
                GATHER,
                predicts=Prediction("another gradient, or 1/W of it if each rank has all rows"),
            )
            return


def _contrasting(fact: WindowFact) -> TermFact | None:
    """The last loss in which every row has a target of its own."""
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
