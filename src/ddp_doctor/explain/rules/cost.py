"""Errors of the wrapper that have a better explanation than their text."""

from collections.abc import Iterator

from ddp_doctor.explain.equation import Equation
from ddp_doctor.explain.findings import Finding, finding
from ddp_doctor.facts.merged import Run


def unused_parameters(run: Run, equation: Equation) -> Iterator[Finding]:
    """Parameters of the wrapped model had no gradient in any observed step.

    Right with find_unused_parameters=True if they are used in other steps: a note then. Without it
    the wrapper's next forward fails.
    """
    for rank in run.ranks:
        if "Expected to have finished reduction" in rank.error_text:
            missing = rank.windows[-1]["snapshot"]["missing"] if rank.windows else []
            names = f": {', '.join(missing[:4])}" if missing else ""
            yield finding(
                "unused_parameters",
                f"Rank {rank.rank}: the wrapper still waited for gradients that backward never "
                f"produced{names}.",
                rank.error["place"] if rank.error else "",
                "Use every parameter's output in the loss, freeze what is not used, or pass "
                "find_unused_parameters=True.",
            )
            return
    if not run.wrappers or not run.complete:
        return
    always = None
    for window in run.complete:
        for _, fact in window:
            unused = set(fact["snapshot"]["missing"])
            always = unused if always is None else always & unused
    if always:
        first = min(always)
        yield finding(
            "unused_parameters",
            f"{len(always)} trained parameters had no gradient in any observed step, first "
            f"{first}.",
            str(run.wrappers[0]["place"]),
            "Remove or freeze them (requires_grad_(False)).",
            "note",
        )


def saved_tensor_overwritten(run: Run, equation: Equation) -> Iterator[Finding]:
    """Backward fails because a tensor that it needs was changed after the forward.

    Under DDP a second forward before backward broadcasts the buffers in place.
    """
    for rank in run.ranks:
        if "modified by an inplace operation" in rank.error_text:
            broadcast = any(wrapper["broadcast_buffers"] for wrapper in run.wrappers)
            yield finding(
                "saved_tensor_overwritten",
                f"Rank {rank.rank}: a tensor that backward needs was changed in place."
                + (
                    " Each forward of the wrapper overwrites all buffers with rank 0's, so a "
                    "second forward before backward changes tensors that backward still needs."
                    if broadcast
                    else ""
                ),
                rank.error["place"] if rank.error else "",
                "One forward per backward, or broadcast_buffers=False, or concatenate the inputs "
                "and call the wrapper once.",
            )
            return


RULES = (unused_parameters, saved_tensor_overwritten)
