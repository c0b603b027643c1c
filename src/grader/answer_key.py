"""The answer key of an assignment for one seed: the inputs, and what the key and wrong answers do.

The key is executed first, on inputs drawn from the seed; what it returns is what is expected. All
code here is the teacher's, so one sandbox serves for all of it.
"""

import contextlib
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from grader.outputs import Results, are_same
from grader.sandbox import EndedError, Sandbox
from grader.source import Assignment, CheckSource

SHOWN_SEED = 1  # of the inputs that students and authors see
_DRAWING = 60.0  # seconds for all draws of an assignment
_MARGIN = 10.0  # seconds that a sandbox may take beyond the ranks' own limit


class AuthorError(RuntimeError):
    """The assignment's own code failed: the check, or the key. The text says where and how."""


@dataclass
class Outcome:
    """What one group of ranks did: returned results, or stopped."""

    results: Results | None = None  # what each rank returned
    stopped: dict[str, Any] = field(default_factory=dict)
    failed_cells: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def timed_out(self) -> bool:
        return self.stopped.get("how") in ("timeout", "too long")

    @property
    def not_written(self) -> bool:
        """Whether a stub ran: torch raises this type, too, but with a message."""
        return self.stopped.get("type") == "NotImplementedError" and not self.stopped.get("message")


def run_check(
    sandbox: Sandbox,
    check: CheckSource,
    cells: list[list[str]],
    inputs: list[list[dict[str, Any]]],
    seed: int,
    seconds: float | None = None,
    key: Sequence[Results] = (),
) -> list[Outcome]:
    """Run `check` with `cells` on each group of ranks, until one returns nothing, or not its key.

    The check is lost then; the other groups would not change that.
    """
    outcomes: list[Outcome] = []
    request = {"call": "run", "source": check.source, "cells": cells, "seed": seed}
    request["seconds"] = seconds or check.seconds
    for group, wanted in zip_longest(inputs, key):
        outcomes.append(_outcome(sandbox, request | {"givens": group}))
        found = outcomes[-1].results
        if found is None or (wanted is not None and not are_same(found, wanted, check.tolerance)):
            break
    return outcomes


def _outcome(sandbox: Sandbox, request: dict[str, Any]) -> Outcome:
    """What one group of ranks did. Whatever comes back is checked: a student's process sent it."""
    try:
        answer = sandbox.ask(request, request["seconds"] + _MARGIN)
    except EndedError as error:
        how = "too long" if "too long" in str(error) else "ended"
        return Outcome(stopped={"how": how, "states": str(error)})
    try:
        failed = [dict(one["failed"]) for one in answer.get("ranks") or [answer["stopped"]]]
        about = {name: dict(why) for one in reversed(failed) for name, why in one.items()}
        if "stopped" in answer:
            return Outcome(stopped=dict(answer["stopped"]), failed_cells=about)
        if len(failed) == len(request["givens"]):
            return Outcome([one["value"] for one in answer["ranks"]], failed_cells=about)
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    no_answer = "the ranks returned something that is no answer"
    return Outcome(stopped={"how": "ended", "states": no_answer})


def draw(sandbox: Sandbox, checks: Sequence[CheckSource], seed: int) -> dict[str, list[Any]]:
    """The inputs of each group of ranks of each check. Raises AuthorError."""
    groups, draws = [], []
    for check in checks:  # where it says no numbers of ranks, the seed chooses one
        for ranks in check.ranks or [random.Random(f"{seed} {check.name}").choice((2, 3, 4))]:
            own = random.Random(f"{seed} {check.name} {ranks}").getrandbits(62)
            groups.append((check, ranks))
            draws.append({"source": check.source, "seed": own, "world_size": ranks})
    try:
        request = {"call": "draw", "draws": draws, "seconds": _DRAWING}
        answer = sandbox.ask(request, _DRAWING + _MARGIN)
    except EndedError as error:
        answer = {"failed": str(error)}
    if "drawn" not in answer:
        raise AuthorError(f"a check's draw(rng, ranks) failed: {answer.get('failed')}")
    found: dict[str, list[Any]] = {check.name: [] for check in checks}
    for (check, ranks), inputs in zip(groups, answer["drawn"], strict=True):
        if not isinstance(inputs, list) or len(inputs) != ranks:
            raise AuthorError(
                f"check {check.name}: draw(rng, {ranks}) has to return a list of {ranks} "
                "dictionaries, one per rank"
            )
        found[check.name].append(inputs)
    return found


class AnswerKey(contextlib.AbstractContextManager["AnswerKey"]):
    """The inputs of `seed`, and what the key and the wrong answers return for them."""

    def __init__(
        self,
        assignment: Assignment,
        seed: int,
        trust: bool = False,
        stop: threading.Event | None = None,
    ) -> None:
        self.assignment, self.seed, self.trust = assignment, seed, trust
        self.stop = stop or threading.Event()
        self._sandbox = Sandbox(trust, self.stop)
        self._inputs: dict[str, list[Any]] = {}
        self._outcomes: dict[tuple[str, ...], list[Outcome]] = {}
        self._lock = threading.RLock()

    def __exit__(self, *_: object) -> None:
        self._sandbox.end()

    def inputs(self, check: CheckSource) -> list[Any]:
        """The inputs of each group of ranks. Raises AuthorError."""
        with self._lock:
            if not self._inputs:
                self._inputs = draw(self._sandbox, self.assignment.checks, self.seed)
            return self._inputs[check.name]

    def key_results(self, check: CheckSource) -> list[Results]:
        """What the key returns, for each group of ranks. Raises AuthorError."""
        outcomes = self.outcomes(check, self.assignment.keys())
        if outcomes[-1].results is None:
            raise AuthorError(f"check {check.name}: the key {describe(outcomes[-1], check)}")
        return [outcome.results or [] for outcome in outcomes]

    def outcomes(self, check: CheckSource, solutions: dict[str, str]) -> list[Outcome]:
        """What the teacher's own `solutions` do, for each group of ranks; run once only."""
        with self._lock:
            keys = self.assignment.keys()
            called = (check.name, *(solutions[name] for name in check.solutions))
            if called not in self._outcomes:
                is_key = called[1:] == tuple(keys[name] for name in check.solutions)
                key = () if is_key else self.key_results(check)
                cells, inputs = self.assignment.cells(check, solutions), self.inputs(check)
                done = run_check(self._sandbox, check, cells, inputs, self.seed, key=key)
                self._outcomes[called] = done
            return self._outcomes[called]


def describe(outcome: Outcome, check: CheckSource) -> str:
    """What stopped the ranks, in words that follow a subject: "rank 1 raised …"."""
    about = outcome.stopped
    how, states = about.get("how"), str(about.get("states", ""))[:1000]
    if how == "raised":
        kind, message = str(about.get("type", ""))[:100], str(about.get("message", ""))
        if outcome.not_written:
            return f"is not written yet ({' or '.join(check.solutions)})"
        first = message.partition("\n")[0][:300]
        place = f", in cell {about['cell']}, line {about.get('line')}" if about.get("cell") else ""
        return f"raised {kind} on rank {about.get('rank')}{place}{': ' if first else ''}{first}"
    if how == "timeout":
        return f"does not come to an end on {states.count('rank ') or 'some'} ranks: {states}"
    return f"was ended: {states}"


def could_not_run(cell: str, about: dict[str, Any]) -> str:
    """Why a student's cell could not be executed to its end."""
    line = f", line {about.get('line')}" if about.get("line") else ""
    message = str(about.get("message", "")).partition("\n")[0]
    kind = f"{str(about.get('type', ''))[:100]}{': ' if message else ''}{message[:300]}"
    return f"cell {cell} could not be executed{line}: {kind}"
