"""Hangs: who waits in which call at which line, and who is elsewhere."""

from collections.abc import Iterator

from ddp_doctor.calls import CALLS, UNEVEN
from ddp_doctor.equation import Equation
from ddp_doctor.findings import Finding, finding
from ddp_doctor.merged import Rank, Run

WAITING = ("timed out", "timeout", "closed by peer", "connection reset", "application timeout",
           "aborted", "broken pipe", "connection refused")  # fmt: skip


def _doing(rank: Rank) -> tuple[str, str]:
    """(what, place): what a rank was doing when it stopped making progress."""
    stuck = rank.all("stuck")
    text = rank.now.doing if rank.now else ""
    if stuck and (text == "ended" or not text):
        text = str(stuck[-1]["doing"])
    if rank.error and text == "ended":
        text = str((rank.last("end") or {}).get("during") or "failed")
    what, _, place = text.partition(" at ")
    if not place and stuck and stuck[-1]["stack"]:
        place = next(
            (
                frame.split(" in ")[0]
                for frame in stuck[-1]["stack"]
                if "site-packages" not in frame
            ),
            "",
        )
    if rank.error and rank.error["place"]:
        place = place or str(rank.error["place"])
    return what, place


def stuck(run: Run, equation: Equation) -> Iterator[Finding]:
    """Some ranks wait in a collective that others are not in.

    Right if all ranks ended, or if the ranks are in the same call: then the link is slow, and the
    program is not at fault. While the run goes on, a rank that is busy may still come: a warning.
    """
    if run.world < 2 or not run.ranks:
        return
    waiting = [rank for rank in run.ranks if _waits(rank, run.hung)]
    if not waiting:
        return
    others = [rank for rank in run.ranks if rank not in waiting]
    calls = {rank.rank: _doing(rank) for rank in waiting}
    first = waiting[0]
    what, place = calls[first.rank]
    distinct = {_kind(call) for call in calls.values()}
    if len(distinct) > 1:
        listed = "; ".join(
            f"rank {rank} in {call} at {at or '?'}" for rank, (call, at) in list(calls.items())[:6]
        )
        yield finding(
            "mismatched_collectives",
            f"The ranks wait in different calls: {listed}.",
            place,
            "Let all ranks call the same collectives in the same order; move the call out of the "
            "if on the rank or on the data.",
        )
        return
    if others or run.missing:
        # Ranks that still run explain nothing if others have ended.
        gone = [rank for rank in others if not rank.alive or run.hung]
        listed = "; ".join(f"rank {rank.rank} {_said(rank)}" for rank in (gone or others)[:6])
        listed = listed or ", ".join(f"rank {rank} never started" for rank in run.missing[:6])
        ranks = ", ".join(str(rank.rank) for rank in waiting[:8])
        busy = run.hung and not run.missing and all(r.alive and not r.ended for r in others)
        fix = (
            "Let every rank reach this call equally often: no if on the rank, no return or break "
            "on one rank's data."
        )
        if busy:
            names = ", ".join(str(rank.rank) for rank in others[:8])
            fix = f"If rank {names} is busy (a checkpoint, text to generate), ignore this. {fix}"
        yield finding(
            "hang_missing_rank",
            f"Rank {ranks} waits in {what} at {place or '?'} (step {first.steps}); {listed}.",
            place,
            fix,
            "warning" if busy else None,
        )


def _kind(call: tuple[str, str]) -> tuple[str, str]:
    name = call[0].split(" ")[0]
    shaped = name in CALLS and name not in UNEVEN and "of shape" in call[0]
    return (name, call[0] if shaped else "")


def _waits(rank: Rank, hung: bool) -> bool:
    """Whether the rank waits for others, or failed because it did."""
    end = rank.last("end")
    if end is not None:
        error = end.get("error")
        if error is None:
            return False
        text = str(error["text"]).lower()
        during = str(end.get("during", ""))
        if error["type"] == "KeyboardInterrupt":
            return _blocking(during)
        return any(word in text for word in WAITING) and _blocking(during)
    doing = rank.now.doing if rank.now else ""
    if rank.alive:
        return hung and _blocking(doing)
    stuck = rank.all("stuck")
    return (
        bool(stuck)
        and _blocking(doing)
        and stuck[-1]["since"] == (rank.now.since if rank.now else None)
    )


def _blocking(doing: str) -> bool:
    name = doing.split(" ")[0]
    return name in CALLS or name in (
        "backward", "forward", "init_process_group", "destroy_process_group"
    )  # fmt: skip


def _said(rank: Rank) -> str:
    end = rank.last("end")
    if end is not None and end.get("error"):
        error = end["error"]
        return f"failed at {error['place']} with {error['type']} after {rank.steps} steps"
    if end is not None:
        return f"had ended after {rank.steps} steps"
    if not rank.alive:
        return f"ended unexpectedly (killed, or os._exit) after {rank.steps} steps"
    what, place = _doing(rank)
    what = what if _blocking(what) else "its own code"
    return f"is in {what}{f' at {place}' if place else ''}, step {rank.steps}"


RULES = (stuck,)
