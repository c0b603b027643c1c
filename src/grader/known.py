"""What is known of an assignment for one seed: the inputs, and what the key and wrong answers do.

The key is executed first, on inputs drawn from the seed; what it returns is what is expected. All
code here is the teacher's, so one sandbox serves for all of it.
"""

import random
import threading
from dataclasses import dataclass, field
from typing import Any, Self

from grader.outputs import Results
from grader.sandbox import EndedError, Sandbox
from grader.source import Assignment, CheckSource, WrongAnswer

_DRAWING = 60.0  # seconds for all draws of an assignment
_MARGIN = 120.0  # seconds that a sandbox may take beyond the ranks' own limit


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


def run_group(
    sandbox: Sandbox,
    check: CheckSource,
    cells: list[list[str]],
    inputs: list[dict[str, Any]],
    seed: int,
    seconds: float | None = None,
) -> Outcome:
    """Run `check` with `cells` on the ranks that have `inputs`. Whatever comes back is checked."""
    limit = seconds or check.seconds
    request = {"call": "run", "source": check.source, "cells": cells, "givens": inputs}
    try:
        answer = sandbox.ask(request | {"seconds": limit, "seed": seed}, limit + _MARGIN)
    except EndedError as error:
        how = "too long" if "too long" in str(error) else "ended"
        return Outcome(stopped={"how": how, "states": str(error)})
    ranks = answer.get("ranks")
    if _are_results(ranks, len(inputs)):
        failed = [one["failed"] for one in ranks if isinstance(one["failed"], dict)]
        merged = {name: about for one in reversed(failed) for name, about in one.items()}
        return Outcome([one["value"] for one in ranks], failed_cells=merged)
    stopped = answer.get("stopped")
    if not isinstance(stopped, dict):
        stopped = {"how": "ended", "states": "the ranks returned something that is no answer"}
    failed = stopped.get("failed")
    return Outcome(stopped=stopped, failed_cells=failed if isinstance(failed, dict) else {})


def _are_results(ranks: Any, count: int) -> bool:
    return (
        isinstance(ranks, list)
        and len(ranks) == count
        and all(isinstance(one, dict) and {"value", "failed"} <= one.keys() for one in ranks)
    )


class Known:
    """The inputs of `seed`, and what the key and the wrong answers return for them."""

    def __init__(self, assignment: Assignment, seed: int, trust: bool = False) -> None:
        self.assignment, self.seed = assignment, seed
        self.sandbox = Sandbox(trust)
        self._inputs: dict[str, list[list[dict[str, Any]]]] = {}
        self._outcomes: dict[tuple[str, str], list[Outcome]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sandbox.end()

    def inputs(self, check: CheckSource) -> list[list[dict[str, Any]]]:
        """The inputs of each group of ranks. Raises AuthorError."""
        with self._lock:
            if not self._inputs:
                self._draw()
            return self._inputs[check.name]

    def _draw(self) -> None:
        draws = [
            {"source": check.source, "seed": seed_of(self.seed, check, ranks), "world_size": ranks}
            for check in self.assignment.checks
            for ranks in groups_of(check, self.seed)
        ]
        try:
            answer = self.sandbox.ask({"call": "draw", "draws": draws}, _DRAWING)
        except EndedError as error:
            answer = {"failed": str(error)}
        if "drawn" not in answer:
            raise AuthorError(f"a check's draw(rng, ranks) failed: {answer.get('failed')}")
        drawn = iter(answer["drawn"])
        for check in self.assignment.checks:
            groups = []
            for ranks in groups_of(check, self.seed):
                inputs = next(drawn)
                if not isinstance(inputs, list) or len(inputs) != ranks:
                    raise AuthorError(
                        f"check {check.name}: draw(rng, {ranks}) has to return a list of {ranks} "
                        "dictionaries, one per rank"
                    )
                groups.append(inputs)
            self._inputs[check.name] = groups

    def key(self, check: CheckSource) -> list[Results]:
        """What the key returns, for each group of ranks. Raises AuthorError."""
        outcomes = self._run(check, "", self.assignment.keys())
        for outcome in outcomes:
            if outcome.results is None:
                raise AuthorError(f"check {check.name}: the key {told(outcome, check, True)}")
        return [outcome.results for outcome in outcomes if outcome.results is not None]

    def wrong(self, answer: WrongAnswer, check: CheckSource) -> list[Outcome]:
        """What a wrong answer does, for each group of ranks."""
        solutions = self.assignment.keys() | {answer.solution: answer.source}
        return self._run(check, answer.name, solutions)

    def _run(self, check: CheckSource, name: str, solutions: dict[str, str]) -> list[Outcome]:
        inputs = self.inputs(check)
        with self._lock:
            if (name, check.name) not in self._outcomes:
                cells = self.assignment.cells(check, solutions)
                self._outcomes[name, check.name] = [
                    run_group(self.sandbox, check, cells, group, self.seed) for group in inputs
                ]
            return self._outcomes[name, check.name]


def groups_of(check: CheckSource, seed: int) -> tuple[int, ...]:
    """The numbers of ranks on which `check` is run with `seed`."""
    return check.ranks or (random.Random(f"{seed} {check.name}").choice((2, 3, 4)),)


def seed_of(seed: int, check: CheckSource, ranks: int) -> int:
    """The seed of the inputs of one group of ranks."""
    return random.Random(f"{seed} {check.name} {ranks}").getrandbits(62)


def told(outcome: Outcome, check: CheckSource, show_message: bool) -> str:
    """What stopped the ranks, in words that follow a subject: "rank 1 raised …"."""
    about = outcome.stopped
    how, states = about.get("how"), str(about.get("states", ""))[:1000]
    if how == "raised":
        kind, message = str(about.get("type", ""))[:100], str(about.get("message", ""))
        if outcome.not_written:
            return f"is not written yet ({' or '.join(check.solutions)})"
        # The text of an exception can carry the input that the rank was given.
        first = message.splitlines()[0][:300] if message and show_message else ""
        place = f", in cell {about['cell']}, line {about.get('line')}" if about.get("cell") else ""
        return f"raised {kind} on rank {about.get('rank')}{place}{': ' if first else ''}{first}"
    if how == "timeout":
        return f"does not come to an end on {states.count('rank ') or 'some'} ranks: {states}"
    return f"was ended: {states}"
