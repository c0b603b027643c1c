"""Cost, and the errors of the wrapper that have a better explanation than their text."""

from collections.abc import Iterator

from ddp_doctor.equation import Equation
from ddp_doctor.findings import Finding, finding
from ddp_doctor.merged import Run


def find_unused_without_need(run: Run, equation: Equation) -> Iterator[Finding]:
    """find_unused_parameters=True, and every parameter had a gradient in every observed step.

    Right if some step does leave parameters out.
    """
    for wrapper in run.wrappers:
        if not wrapper["find_unused"] or len(run.complete) < 2 or run.world < 2:
            continue
        if any(fact["snapshot"].get("missing") for w in run.complete for _, fact in w):
            continue
        reached = [
            b["wrappers"].get(str(wrapper["index"]), 0)
            for w in run.complete
            for _, fact in w
            for b in fact["backwards"]
        ]
        if reached and min(reached) >= wrapper["parameters"]:
            yield finding(
                "find_unused_without_need",
                f"All {wrapper['parameters']} parameters had a gradient in every observed step; "
                f"the wrapper walks the graph in every forward to look for unused ones.",
                wrapper["place"],
                "Leave out find_unused_parameters=True.",
            )
            return


def unused_parameters(run: Run, equation: Equation) -> Iterator[Finding]:
    """Parameters of the wrapped model had no gradient in any observed step.

    Right with find_unused_parameters=True if they are used in other steps: a note then. Without it
    the wrapper's next forward fails.
    """
    for rank in run.ranks:
        text = (rank.error or {}).get("text", "")
        if "Expected to have finished reduction" in text:
            missing = rank.windows[-1]["snapshot"].get("missing", []) if rank.windows else []
            names = f": {', '.join(missing[:4])}" if missing else ""
            yield finding(
                "unused_parameters",
                f"Rank {rank.rank}: the wrapper still waited for gradients that backward never "
                f"produced{names}.",
                str((rank.error or {}).get("place", "")),
                "Use every parameter's output in the loss, freeze what is not used, or pass "
                "find_unused_parameters=True.",
            )
            return
    if not run.wrappers or not run.complete:
        return
    always = None
    for window in run.complete:
        for _, fact in window:
            missing = set(fact["snapshot"].get("missing", ()))
            always = missing if always is None else always & missing
    if always:
        names = sorted(always)
        yield finding(
            "unused_parameters",
            f"{len(names)} trained parameters had no gradient in any observed step, first "
            f"{names[0]}.",
            str(run.wrappers[0]["place"]),
            "Remove or freeze them (requires_grad_(False)).",
            "note",
        )


def one_bucket(run: Run, equation: Equation) -> Iterator[Finding]:
    """All gradients are in one bucket, so that the all-reduce starts when backward ends.

    Right for small models (under 2 MB), where there is nothing to overlap.
    """
    for wrapper in run.wrappers:
        cap = wrapper["bucket_cap"]
        if (
            wrapper["world"] > 1
            and cap
            and wrapper["bytes"] > 2 << 20
            and cap * (1 << 20) >= wrapper["bytes"]
        ):
            yield finding(
                "one_bucket",
                f"bucket_cap_mb={cap} holds all {wrapper['bytes'] >> 20} MB of gradients in one "
                f"bucket: the all-reduce cannot overlap with backward.",
                wrapper["place"],
                "Leave bucket_cap_mb at its default of 25, or choose a smaller cap.",
            )
            return


def saved_tensor_overwritten(run: Run, equation: Equation) -> Iterator[Finding]:
    """Backward fails because a tensor that it needs was changed after the forward.

    Under DDP a second forward before backward broadcasts the buffers in place.
    """
    for rank in run.ranks:
        error = rank.error or {}
        if "modified by an inplace operation" in error.get("text", ""):
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
                str(error.get("place", "")),
                "One forward per backward, or broadcast_buffers=False, or concatenate the inputs "
                "and call the wrapper once.",
            )
            return


RULES = (find_unused_without_need, unused_parameters, one_bucket, saved_tensor_overwritten)
