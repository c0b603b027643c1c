"""Hangs: who waits in which call at which line, and who is elsewhere."""

from collections.abc import Iterator

from ddp_doctor.explain.findings import Finding, finding, rule
from ddp_doctor.explain.steps import Step
from ddp_doctor.facts.merged import Rank, Run
from ddp_doctor.facts.types import CALLS, UNEVEN

WAITING = ("timed out", "timeout", "closed by peer", "connection reset", "application timeout",
           "aborted", "broken pipe", "connection refused")  # fmt: skip


@rule("hang_missing_rank", "mismatched_collectives")
def stuck(run: Run, steps: list[Step]) -> Iterator[Finding]:
    """Some ranks wait in a collective that others are not in.

    Right if all ranks ended, or if the ranks are in the same call: then the link is slow, and the
    program is not at fault. While the run goes on, a rank that is busy may still come: a warning.
    """
    waiting = [rank for rank in run.ranks if run.world > 1 and _waits(rank, run.hung)]
    if not waiting:
        return
    calls = {rank.rank: _doing(rank) for rank in waiting}
    if len({_kind(call) for call, _ in calls.values()}) > 1:
        listed = "; ".join(
            f"rank {rank} in {call} at {at or '?'}" for rank, (call, at) in list(calls.items())[:6]
        )
        yield finding(
            "mismatched_collectives",
            f"The ranks wait in different calls: {listed}.",
            calls[waiting[0].rank][1],
            "Let all ranks call the same collectives in the same order; move the call out of the "
            "if on the rank or on the data.",
        )
    elif len(waiting) < len(run.ranks) or run.missing:
        yield _missing_rank(run, waiting)


def _missing_rank(run: Run, waiting: list[Rank]) -> Finding:
    others = [rank for rank in run.ranks if rank not in waiting]
    # Ranks that still run explain nothing if others have ended.
    gone = [rank for rank in others if not rank.alive or run.hung]
    listed = "; ".join(f"rank {rank.rank} {_said(rank)}" for rank in (gone or others)[:6])
    listed = listed or ", ".join(f"rank {rank} never started" for rank in run.missing[:6])
    what, place = _doing(waiting[0])
    fix = (
        "Let every rank reach this call equally often: no if on the rank, no return or break "
        "on one rank's data."
    )
    busy = run.hung and not run.missing and all(r.alive and r.end is None for r in others)
    if busy:
        names = ", ".join(str(rank.rank) for rank in others[:8])
        fix = f"If rank {names} is busy (a checkpoint, text to generate), ignore this. {fix}"
    return finding(
        "hang_missing_rank",
        f"Rank {', '.join(str(rank.rank) for rank in waiting[:8])} waits in {what} at "
        f"{place or '?'} (step {waiting[0].steps}); {listed}.",
        place,
        fix,
        "warning" if busy else None,
    )


def _doing(rank: Rank) -> tuple[str, str]:
    """(what, place): what a rank was doing when it stopped making progress."""
    end = rank.end
    text = str(end["during"]) if end else rank.status.doing if rank.status else ""
    what, _, place = text.partition(" at ")
    stack = [frame for fact in rank.facts["stuck"][-1:] for frame in fact["stack"]]
    users = [frame.split(" in ")[0] for frame in stack if "site-packages" not in frame]
    raised = str(rank.error["place"]) if rank.error else ""
    return what, place or (users[0] if users else raised)


def _kind(call: str) -> tuple[str, str]:
    name = call.split(" ")[0]
    shaped = name in CALLS and name not in UNEVEN and "of shape" in call
    return (name, call if shaped else "")


def _waits(rank: Rank, hung: bool) -> bool:
    """Whether the rank waits for others, or failed because it did."""
    end = rank.end
    if end is not None:
        error = end.get("error")
        if error is None or not _blocking(end["during"]):
            return False
        text = str(error["text"]).lower()
        return error["type"] == "KeyboardInterrupt" or any(word in text for word in WAITING)
    if rank.status is None or not _blocking(rank.status.doing):
        return False
    if rank.alive:
        return hung
    return any(fact["since"] == rank.status.since for fact in rank.facts["stuck"][-1:])


def _blocking(doing: str) -> bool:
    name = doing.split(" ")[0]
    return name in CALLS or name in (
        "backward", "forward", "init_process_group", "destroy_process_group"
    )  # fmt: skip


def _said(rank: Rank) -> str:
    if error := rank.error:
        return f"failed at {error['place']} with {error['type']} after {rank.steps} steps"
    if rank.end is not None:
        return f"had ended after {rank.steps} steps"
    if not rank.alive:
        return f"ended unexpectedly (killed, or os._exit) after {rank.steps} steps"
    what, place = _doing(rank)
    what = what if _blocking(what) else "its own code"
    return f"is in {what}{f' at {place}' if place else ''}, step {rank.steps}"
