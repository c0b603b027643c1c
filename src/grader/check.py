"""One check: draw fresh inputs, run the ranks, compare what they returned, look at what passed.

A check cell of a source notebook is a small module. Of its functions only `on_rank`, and what that
uses, meets code of a student's; the others run in a process of their own (`grader.inside.oracle`),
and no rank receives their text:

    draw(rng)                     a list of dictionaries: each rank's own input
    on_rank(student, given)       on every rank: call the student's function, return data
    expected(givens)              what has to come out
    mistakes(givens)              {sentence: what comes out of a known mistake}
    judge(seen, results, givens)  raise Missed("…") over what passed between the ranks
    implementations()             {name: wrap}: what a student's own test has to judge

`expected` returns what every rank has to return, or a list of one for each rank. Two entries of a
rank's input stay on the trusted side:

- "gates", {name: number or vector}: each stays there until backward opens the gate. On the rank,
  `gate(tensor, name)` puts a gate into the graph.
- "implementations": the names of what `implementation(0)`, `implementation(1)`, … are on the ranks.
"""

import math
import random
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from grader.mutants import museum_sources
from grader.oracle import Oracle, OracleError
from grader.ranks import GroupEnd, RankEnd, run_group
from grader.record import read_record, recorded, what_implementations_need, what_ranks_need
from grader.router import Router
from grader.source import CheckSource

_STUB = ("NotImplementedError", "")  # type and message: torch raises this type with a message
_TRUSTED_KEYS = ("gates", "implementations")  # of a rank's input
_MOST_SHARED = 1000  # an array may take this many times its own largest magnitude from others
_MOST_MISTAKES = 50  # differences are looked for in as many known mistakes


class GraderError(RuntimeError):
    """The check itself is at fault, or the machine; a person has to look."""


@dataclass
class Verdict:
    """What became of one check."""

    check: str
    passed: bool
    sentence: str = ""  # the concept missed, or what stopped the ranks
    where: str = ""  # visible checks only: the first rank and place that differ
    line: str = ""  # the text of the student's line that failed
    failed_cells: dict[str, str] = field(default_factory=dict)  # a sentence per cell
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
    *,
    oracle: Oracle | None = None,
    patience: float = 1.0,
) -> Verdict:
    """Run `check` on `solutions` (source by name) with the inputs of `seed`.

    `givens` are the sources of the assignment's given cells, `address` a running fork server's, and
    `oracle` a process there that answers for the check; without it one is started. `patience`
    shortens the limits by the clock. Raises GraderError when the check's own code fails, OSError
    when the fork server is gone.
    """
    if oracle is None:
        with Oracle(address) as own:
            return run_check(check, givens, solutions, address, seed, oracle=own, patience=patience)
    started = time.monotonic()
    if check.record:
        inputs, answer = read_record(check)
    else:
        inputs, answer = _draw(check, oracle, seed)
    end = _run_students(check, givens, solutions, address, inputs, seed, patience)
    verdict = Verdict(check.name, False, isolation=end.isolation, seed=seed)
    verdict.failed_cells = _failed_cells(end, check)
    verdict.timed_out = any(state.how == "timed out" for state in end.ranks)
    verdict.sentence = _stopped(end, check)
    verdict.line = _line_of(end, givens, solutions)
    if not verdict.sentence:
        results = [state.value for state in end.ranks]
        _compare(verdict, check, results, answer)
        if not verdict.sentence and "\ndef judge(" in check.source:
            verdict.sentence = _judge(check, oracle, inputs, results, end)
        verdict.passed = not verdict.sentence
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


def record_check(check: CheckSource, address: str, seed: int) -> CheckSource:
    """`check` as a release carries it: with the inputs of `seed` and the answers to them."""
    with Oracle(address) as oracle:
        return recorded(check, *_draw(check, oracle, seed))


def _draw(
    check: CheckSource, oracle: Oracle, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    try:
        drawn = oracle.ask({"check": check.source, "call": "draw", "seed": seed})
    except OracleError as error:
        raise GraderError(f"check {check.name}, draw: {error}") from None
    return drawn["inputs"], drawn["answer"]


def _judge(
    check: CheckSource,
    oracle: Oracle,
    inputs: list[dict[str, Any]],
    results: list[Any],
    end: GroupEnd,
) -> str:
    """What the check objects to; empty if to nothing.

    The results are right, or there is nothing to compare them with. In either case a judge that
    stumbles does so over what these ranks returned or sent.
    """
    about = {"inputs": inputs, "results": results, "seen": asdict(end.seen)}
    try:
        said = oracle.ask({"check": check.source, "call": "judge", **about})
    except OracleError as error:
        return f"{check.concept} (The check could not read what the ranks returned: {error}.)"
    except TypeError:  # deeper than a message may be
        return check.concept
    return said.get("objection", "")


def _run_students(check, givens, solutions, address, inputs, seed, patience) -> GroupEnd:
    cells = [{"id": f"given {n}", "source": source} for n, source in enumerate(givens)]
    cells += [{"id": name, "source": solutions[name]} for name in check.solutions]
    # A callee can read its caller's module, which must not hold the answer.
    part = what_ranks_need(check.source)
    common = {
        "world_size": len(inputs),
        "link": check.link,
        "torch_ddp": check.torch_ddp,
        "meet": "../meet",
        "seconds": check.seconds,
    }
    jobs = [
        {
            **common,
            "call": "on_rank",
            "cells": cells,
            "check": part,
            "given": {key: value for key, value in given.items() if key not in _TRUSTED_KEYS},
            "rank": rank,
            # Not the seed of the inputs, from which a rank could draw the other ranks'.
            "seed": random.Random(f"{seed} {rank}").getrandbits(31),
        }
        for rank, given in enumerate(inputs)
    ]
    stands = []
    if "implementations" in inputs[0]:
        stands = [
            {
                **common,
                "call": "implementations",
                "check": what_implementations_need(check.source),
                "museum": museum_sources(check.museum),
                "names": given["implementations"],
                "rank": rank,
            }
            for rank, given in enumerate(inputs)
        ]
    return run_group(
        address,
        jobs,
        link=check.link,
        seconds=check.seconds,
        router=Router(len(inputs), [given.get("gates", {}) for given in inputs], check.hold),
        implementations=stands,
        patience=patience,
    )


def _line_of(end: GroupEnd, givens: tuple[str, ...], solutions: dict[str, str]) -> str:
    """The line of a student's cell that raised what stopped the check; empty if none did."""
    errors = [error for state in end.ranks for error in state.failed_cells.values()]
    errors += [state.error for state in end.ranks if state.how == "raised"]
    for error in errors:
        lines = solutions.get(error.get("cell") or "", "").splitlines()
        if error.get("line") and error["line"] <= len(lines):
            return lines[error["line"] - 1].strip()[:200]
    return ""


def _failed_cells(end: GroupEnd, check: CheckSource) -> dict[str, str]:
    """One sentence per cell that could not be executed on some rank."""
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
    errors = [state.error for state in end.ranks if state.how == "raised"]
    if _STUB in [(error.get("type"), error.get("message")) for error in errors]:
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
    if "expected" not in answer:
        return
    wanted = _for_each_rank(answer["expected"], len(results))
    where = _first_difference(results, wanted, check.tolerance)
    if where:
        verdict.sentence = _name_the_mistake(results, check, answer) or check.concept
        verdict.where = where if check.visible else ""


def _for_each_rank(wanted: Any, world_size: int) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted] * world_size


def _name_the_mistake(results: list[Any], check: CheckSource, answer: dict[str, Any]) -> str:
    for sentence, wrong in list(answer.get("mistakes", {}).items())[:_MOST_MISTAKES]:
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


def difference(
    got: Any, want: Any, tolerance: float, place: str = "", *, shared: float = 0.0
) -> str | None:
    """Where `got` first differs from `want`; None if nowhere.

    A number or an array may differ from `want` by `tolerance` times its largest magnitude. Arrays
    in one dictionary use the largest magnitude among them, `shared`, but at most a thousand times
    their own: where the samples' contributions to one gradient nearly cancel, that gradient is
    small, but its rounding error is not. Everything else must be equal. A value that is not finite
    equals nothing.
    """
    if isinstance(want, np.ndarray):
        return _array_difference(got, want, tolerance, place, shared)
    if isinstance(want, dict):
        if not isinstance(got, dict) or set(got) != set(want):
            return place
        arrays = [value for value in want.values() if isinstance(value, np.ndarray)]
        shared = max(map(_largest, arrays), default=0.0)
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
        found = difference(left, right, tolerance, where, shared=shared)
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


def _largest(array: np.ndarray) -> float:
    """The largest magnitude in `array`; 0 unless its dtype is floating-point or complex."""
    return float(np.abs(array).max(initial=0.0)) if array.dtype.kind in "fc" else 0.0


def _array_difference(
    got: Any, want: np.ndarray, tolerance: float, place: str, shared: float
) -> str | None:
    if not isinstance(got, np.ndarray) or got.shape != want.shape:
        return place
    # Overflow and inf − inf are results like others; numpy would print a warning.
    with np.errstate(all="ignore"):
        if want.dtype.kind not in "fc" or got.dtype.kind not in "biufc":
            wrong = np.broadcast_to(got != want, want.shape)
        else:
            own = _largest(want)
            scale = max(own, min(shared, _MOST_SHARED * own))
            exact = "complex128" if "c" in (want.dtype.kind, got.dtype.kind) else "float64"
            off = np.abs(got.astype(exact) - want.astype(exact))
            wrong = ~(np.isfinite(off) & (off <= tolerance * max(scale, 1e-30)))
    if not wrong.any():
        return None
    index = [int(i) for i in np.argwhere(wrong)[0]]
    return f"{place}{index}" if index else place
