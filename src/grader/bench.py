"""What runs in the kernel that nbval watches: `check("name")`, and nothing of a student's.

The kernel is told where its case lies by the environment: the sources, the checks, the seeds, and
the address of the fork server. `check` prints "passed", which is what the bench notebook has
stored, or "missed", which nbval then reports as a difference. The details go to a file beside it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grader.check import GraderError, run_check
from grader.source import CheckSource

VARIABLE = "GRADER_CASE"
PASSED = "passed"


@dataclass(frozen=True)
class Case:
    """Everything that the checks of one submission need."""

    address: str
    givens: tuple[str, ...]
    solutions: dict[str, str]
    checks: tuple[CheckSource, ...]
    seeds: dict[str, int]  # one a check
    verdicts: str  # the file to which a line is added for each verdict

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> Case:
        raw: dict[str, Any] = json.loads(Path(path).read_text())
        checks = tuple(CheckSource.from_dict(check) for check in raw.pop("checks"))
        return cls(**{**raw, "givens": tuple(raw["givens"]), "checks": checks})


def check(name: str) -> None:
    """Run the check and print its verdict. Raises what makes a person have to look."""
    case = Case.read(os.environ[VARIABLE])
    source = next(check for check in case.checks if check.name == name)
    try:
        verdict = run_check(source, case.givens, case.solutions, case.address, case.seeds[name])
    except (GraderError, OSError) as error:
        _note(case, {"check": name, "needs_human": f"{type(error).__name__}: {error}"})
        raise
    _note(case, verdict.as_dict())
    print(PASSED if verdict.passed else "missed")


def _note(case: Case, line: dict[str, Any]) -> None:
    with open(case.verdicts, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
