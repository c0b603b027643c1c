"""What runs in the kernel that nbval watches; it never executes a line of a student's.

`bench.check(0, "name")` runs one check on one submission, in that submission's sandbox, and prints
what came back. The bench notebook has stored what the key printed, and nbval compares the two.
What came back is also kept in a file, for the feedback.
"""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grader.inside.values import pack, unpack
from grader.known import Known, Outcome, run_group, told
from grader.outputs import text_of
from grader.sandbox import Sandbox
from grader.source import CheckSource

VARIABLE = "GRADER_BENCH"  # names the folder with the cases
_LITTLE = 3.0  # seconds for a solution that has taken too long before


def write_cases(
    folder: Path,
    known: Known,
    submissions: list[dict[str, str]],
    *,
    trust: bool,
    shared: bool,
) -> None:
    """What the kernel needs: checks, inputs, what the key returned, and the submissions' sources.

    `shared`: all submissions are the teacher's own, so one sandbox serves for all of them.
    """
    assignment = known.assignment
    cases = {
        "checks": [asdict(check) for check in assignment.checks],
        "stubs": assignment.stubs(),
        "cells": [
            {check.name: assignment.cells(check, own) for check in assignment.checks}
            for own in submissions
        ],
        "seed": known.seed,
        "trust": trust,
        "shared": shared,
    }
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    for check in assignment.checks:
        data = {"inputs": known.inputs(check), "key": known.key(check)}
        (folder / f"known-{check.name}").write_bytes(pack(data))


def expected_text(check: CheckSource, key: list[list[Any]]) -> str:
    """What the key prints for `check`."""
    return "\n".join(text_of(results, None, check.tolerance) for results in key)


def read_outcomes(folder: Path, number: int, name: str) -> tuple[list[Outcome], float] | None:
    """What the kernel kept of a check of submission `number`, and its seconds; None if nothing."""
    path = folder / f"outcome-{number}-{name}"
    if not path.exists():
        return None
    kept = unpack(path.read_bytes())
    return [Outcome(**one) for one in kept["groups"]], kept["seconds"]


class Bench:
    """The cases of one kernel, and the sandbox of the submission that is graded."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[VARIABLE])
        cases = json.loads((self._folder / "cases.json").read_text(encoding="utf-8"))
        self._checks = {raw["name"]: CheckSource.from_dict(raw) for raw in cases["checks"]}
        self._cells, self._stubs, self._seed = cases["cells"], cases["stubs"], cases["seed"]
        self._trust, self._shared = cases["trust"], cases["shared"]
        self._sandboxes: dict[int, Sandbox] = {}
        self._slow: set[str] = set()  # solutions of the current submission

    def check(self, number: int, name: str) -> None:
        """Run check `name` on submission `number`, and print what its ranks returned."""
        check = self._checks[name]
        cells = self._cells[number][name]
        known = unpack((self._folder / f"known-{name}").read_bytes())
        started = time.monotonic()
        outcomes: list[Outcome] = []
        for inputs, key in zip(known["inputs"], known["key"], strict=True):
            outcome = self._run(number, check, cells, inputs)
            outcomes.append(outcome)
            if outcome.results is None:
                print(f"{name}: {told(outcome, check, False)}")
                break
            print(text_of(outcome.results, key, check.tolerance))
        kept = {"groups": list(map(asdict, outcomes)), "seconds": time.monotonic() - started}
        (self._folder / f"outcome-{number}-{name}").write_bytes(pack(kept))

    def _run(
        self, number: int, check: CheckSource, cells: list[list[str]], inputs: list[dict[str, Any]]
    ) -> Outcome:
        if self._not_written(check, cells):
            return Outcome(stopped={"how": "raised", "type": "NotImplementedError"})
        slow = bool(self._slow & set(check.solutions))
        sandbox = self._sandbox_of(number)
        seconds = _LITTLE if slow else None
        outcome = run_group(sandbox, check, cells, inputs, self._seed, seconds)
        if outcome.timed_out:
            self._slow |= set(check.solutions)
        return outcome

    def _not_written(self, check: CheckSource, cells: list[list[str]]) -> bool:
        """Whether a solution is the stub that only raises: it need not be run."""
        own = dict(cells)
        stubs = [(own[name], self._stubs[name]) for name in check.solutions]
        return any(a.strip() == b.strip() and "raise NotImplementedError" in b for a, b in stubs)

    def _sandbox_of(self, number: int) -> Sandbox:
        wanted = 0 if self._shared else number
        if wanted not in self._sandboxes:
            for sandbox in self._sandboxes.values():
                sandbox.end()
            self._sandboxes = {wanted: Sandbox(self._trust)}
            self._slow = set()
        if self._shared:
            self._slow = set()
        return self._sandboxes[wanted]
