"""The wrapper: whether the gradients pass through what combines them."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_doctor.equation import Equation
from ddp_doctor.findings import Finding, finding
from ddp_doctor.merged import Fact, Run, Window


def wrapper_bypassed(run: Run, equation: Equation) -> Iterator[Finding]:
    """Backward reaches a wrapped model that no forward of the wrapper has prepared.

    Right if the gradients are combined in another way: they are equal on all ranks then. A backward
    under no_sync is prepared, and is another rule's subject.
    """
    if run.world < 2 or not run.wrappers:
        return
    through = any(
        value is not None
        for window in run.windows
        for _, fact in window
        for backward in fact["backwards"]
        for value in backward.get("prepared", {}).values()
    )
    for window in run.complete:
        if not window.differing_gradients:
            continue
        for rank, fact in window:
            bypassed = _bypassed(fact)
            if bypassed is None:
                continue
            names = window.differing_gradients
            where = _place(bypassed)
            code = "wrapper_lost" if through and window.n > 0 and _before(run, window) else None
            yield finding(
                code or "wrapper_bypassed",
                f"Step {window.n}, rank {rank}: backward reached the wrapped model, but no forward "
                f"went through the wrapper. {len(names)} of {_total(fact)} gradients differ "
                f"between the ranks, first {names[0]}.",
                where,
                "Call the wrapper itself: loss = model(batch), not model.module(batch). Put the "
                "loss into the module's forward if it needs the module's methods.",
            )
            return


def _bypassed(fact: Fact) -> Fact | None:
    for backward in fact["backwards"]:
        for index, reached in backward.get("wrappers", {}).items():
            if reached and backward["prepared"].get(index) is None:
                return dict(backward)
    return None


def _before(run: Run, window: Window) -> bool:
    """Whether an earlier window did go through the wrapper and was combined."""
    return any(
        earlier.n < window.n and not earlier.differing_gradients for earlier in run.complete
    )


def _place(backward: Fact) -> str:
    terms = backward.get("terms") or ()
    return str(terms[0]["place"] if terms else backward["place"])


def _total(fact: Fact) -> int:
    return len((fact.get("snapshot") or {}).get("hashes", {}))


RULES = (wrapper_bypassed,)
