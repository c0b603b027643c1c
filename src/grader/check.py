"""One check: draw fresh inputs, run the ranks, compare what they returned, look at what passed.

A check cell of a source notebook is a small module. Of its functions only `on_rank`, and what that
uses, meets code of a student's; the others run in fresh processes of their own
(`grader.inside.oracle`), and no rank receives their text:

    draw(rng)                     a list of dictionaries: each rank's own input
    on_rank(student, given)       on every rank: call the student's function, return data
    expected(givens)              what has to come out
    mistakes(givens)              {sentence: what comes out of a known mistake}
    judge(seen, results, givens)  raise Missed("…") over what passed between the ranks

`expected` returns what every rank has to return, or a list of one for each rank. An entry "gates"
of a rank's input, {name: number}, stays on the trusted side until backward opens the gate; on the
rank `gate(tensor, name)` puts one into the graph.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from grader.mutants import museum_sources
from grader.ranks import GroupEnd, RankEnd, run_group
from grader.record import read_record, recorded, what_ranks_need
from grader.router import Router
from grader.source import CheckSource

_STUB = "NotImplementedError"


class GraderError(RuntimeError):
    """The check itself is at fault, or the machine; a person has to look."""


@dataclass
class Verdict:
    """What became of one check."""

    check: str
    passed: bool
    sentence: str = ""  # the concept missed, or what stopped the ranks
    where: str = ""  # visible checks only: the first rank and place that differ
    failed_cells: dict[str, str] = field(default_factory=dict)  # a sentence a cell
    timed_out: bool = False
    isolation: str = ""  # what stood between the ranks, by the report of their group
    seconds: float = 0.0
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_check(
    check: CheckSource,
    givens: tuple[str, ...],
    solutions: dict[str, str],
    address: str,
    seed: int,
) -> Verdict:
    """Run `check` on `solutions` (source by name) with the inputs of `seed`.

    `givens` are the sources of the assignment's given cells, `address` a running fork server's.
    Raises GraderError when the check's own code fails, OSError when the fork server is gone.
    """
    started = time.monotonic()
    if check.record:
        inputs, answer = read_record(check)
    else:
        inputs, answer = _ask(check, address, {"call": "draw", "seed": seed}), {}
    end = _run_students(check, givens, solutions, address, inputs, seed)
    verdict = Verdict(check.name, False, isolation=end.isolation, seed=seed)
    verdict.failed_cells = _failed_cells(end, check)
    verdict.timed_out = any(state.how == "timed out" for state in end.ranks)
    verdict.sentence = _stopped(end, check)
    if not verdict.sentence:
        results = [state.value for state in end.ranks]
        if not check.record or "\ndef judge(" in check.source:
            about = {"inputs": inputs, "results": results, "seen": asdict(end.seen)}
            answer |= _ask(check, address, {"call": "answer", **about})
        _compare(verdict, check, results, answer)
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


def record_check(check: CheckSource, address: str, seed: int) -> CheckSource:
    """`check` as a release carries it: with the inputs of `seed` and the answers to them."""
    inputs = _ask(check, address, {"call": "draw", "seed": seed})
    nothing = asdict(Router(len(inputs)).seen)
    about = {"inputs": inputs, "results": [], "seen": nothing}
    return recorded(check, inputs, _ask(check, address, {"call": "answer", **about}))


def _ask(check: CheckSource, address: str, call: dict[str, Any]) -> Any:
    """Run the check's own code in a process in which no student's code runs."""
    job = {"check": check.source, **call}
    end = run_group(address, [job], seconds=check.seconds).ranks[0]
    if end.how != "returned":
        what = end.error.get("message", "")
        raise GraderError(f"check {check.name}, {call['call']}: {end.text} {what}")
    return end.value


def _run_students(check, givens, solutions, address, inputs, seed) -> GroupEnd:
    cells = [{"id": f"given {n}", "source": source} for n, source in enumerate(givens)]
    cells += [{"id": name, "source": solutions[name]} for name in check.solutions]
    museum = museum_sources(check.museum)
    # Whoever is called can look at the caller's module: it must not hold the answer.
    part = what_ranks_need(check.source)
    jobs = [
        {
            "call": "on_rank",
            "cells": cells,
            "check": part,
            "given": {key: value for key, value in given.items() if key != "gates"},
            "rank": rank,
            "world_size": len(inputs),
            # Not the seed of the inputs, from which a rank could draw the other ranks'.
            "seed": random.Random(f"{seed} {rank}").getrandbits(31),
            "link": check.link,
            "torch_ddp": check.torch_ddp,
            "museum": museum,
            "meet": "../meet",
            "seconds": check.seconds,
        }
        for rank, given in enumerate(inputs)
    ]
    gates = [given.get("gates", {}) for given in inputs]
    router = Router(len(inputs), gates, check.hold)
    return run_group(address, jobs, link=check.link, seconds=check.seconds, router=router)


def _failed_cells(end: GroupEnd, check: CheckSource) -> dict[str, str]:
    """One sentence a cell that could not be executed on some rank."""
    sentences: dict[str, str] = {}
    for rank, state in enumerate(end.ranks):
        for cell, error in state.failed_cells.items():
            line = f", line {error['line']}" if error["line"] else ""
            detail = _detail(error, check)
            sentences.setdefault(
                cell, f"cell {cell} could not be executed (rank {rank}{line}): {detail}"
            )
    return sentences


def _detail(error: dict[str, Any], check: CheckSource) -> str:
    # The text of an exception can carry the input that the rank was given.
    if check.visible and error["message"]:
        return f"{error['type']}: {error['message'].splitlines()[0][:300]}"
    return error["type"]


def _stopped(end: GroupEnd, check: CheckSource) -> str:
    """Why there is nothing to compare; empty if every rank returned."""
    if all(state.how == "returned" for state in end.ranks):
        return ""
    errors = [state.error.get("type") for state in end.ranks if state.how == "raised"]
    if _STUB in errors:
        return f"{' or '.join(check.solutions)} is not written yet"
    for rank, state in enumerate(end.ranks):
        if state.failed_cells:
            cells = ", ".join(state.failed_cells)
            return f"follows from cell {cells}, which could not be executed on rank {rank}"
    culprits = [(state.order, rank) for rank, state in enumerate(end.ranks) if state.culprit]
    if not culprits and end.seen.trouble:
        return f"the ranks do not meet: {end.seen.trouble}"
    # The first that fell by itself; the others may have fallen over it.
    unfinished = [(0, rank) for rank, state in enumerate(end.ranks) if state.how != "returned"]
    _, rank = min(culprits or unfinished)
    return f"rank {rank} {_how(end.ranks[rank], check)}"


def _how(state: RankEnd, check: CheckSource) -> str:
    if state.how != "raised":
        return state.text
    error = state.error
    place = f" in cell {error['cell']}, line {error['line']}" if error["line"] else ""
    return f"raised {_detail(error, check)}{place}"


def _compare(
    verdict: Verdict, check: CheckSource, results: list[Any], answer: dict[str, Any]
) -> None:
    if "expected" in answer:
        wanted = _for_each_rank(answer["expected"], len(results))
        where = _first_difference(results, wanted, check.tolerance)
        if where:
            verdict.sentence = _name_the_mistake(results, check, answer) or check.concept
            verdict.where = where if check.visible else ""
            return
    if "stumbled" in answer:
        raise GraderError(f"check {check.name}, {answer['stumbled']}")
    verdict.sentence = answer.get("objection", "")
    verdict.passed = not verdict.sentence


def _for_each_rank(wanted: Any, world_size: int) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted] * world_size


def _name_the_mistake(results: list[Any], check: CheckSource, answer: dict[str, Any]) -> str:
    for sentence, wrong in answer.get("mistakes", {}).items():
        if not _first_difference(results, _for_each_rank(wrong, len(results)), check.tolerance):
            return sentence
    return ""


def _first_difference(results: list[Any], wanted: list[Any], tolerance: float) -> str:
    """Rank and place of the first difference; empty if there is none."""
    for rank, (got, want) in enumerate(zip(results, wanted, strict=True)):
        place = difference(got, want, tolerance)
        if place is not None:
            return f"first difference on rank {rank}{', at ' + place if place else ''}"
    return ""


def difference(got: Any, want: Any, tolerance: float, place: str = "") -> str | None:
    """Where `got` first differs from `want`; None if nowhere.

    Numbers and arrays may differ by `tolerance` times the largest magnitude in `want`; everything
    else has to be the same. A value that is not finite equals nothing.
    """
    if isinstance(want, np.ndarray):
        return _array_difference(got, want, tolerance, place)
    if isinstance(want, dict):
        if not isinstance(got, dict) or set(got) != set(want):
            return place
        inner = ((f"{place}[{key!r}]", got[key], value) for key, value in want.items())
    elif isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return place
        inner = ((f"{place}[{i}]", got[i], value) for i, value in enumerate(want))
    elif isinstance(want, float):
        return None if _is_close(got, want, tolerance) else place
    else:
        return None if type(got) is type(want) and got == want else place
    for where, left, right in inner:
        found = difference(left, right, tolerance, where)
        if found is not None:
            return found
    return None


def _is_close(got: Any, want: float, tolerance: float) -> bool:
    if type(got) not in (int, float):
        return False
    try:
        return math.isfinite(got) and abs(got - want) <= tolerance * max(abs(want), 1e-30)
    except OverflowError:  # an integer too large for a float
        return False


def _array_difference(got: Any, want: np.ndarray, tolerance: float, place: str) -> str | None:
    if not isinstance(got, np.ndarray) or got.shape != want.shape:
        return place
    if want.dtype.kind != "f":
        wrong = got != want
    else:
        scale = float(np.abs(want).max(initial=0.0))
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(got.astype("float64") - want) <= tolerance * max(scale, 1e-30))
    if not wrong.any():
        return None
    index = [int(i) for i in np.argwhere(wrong)[0]]
    return f"{place}{index}" if index else place
