"""What runs in the kernel that nbval watches, and nothing of a student's.

The kernel is told where its cases lie by the environment: the sources, the checks, the seeds, and
the address of the fork server. `bench.print_verdict(0, "name")` prints "passed", which is what the
bench notebook has stored, or "missed", which nbval then reports as a difference. The details go to
a file beside it.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from grader.check import run_check
from grader.oracle import Oracle
from grader.source import CheckSource

VARIABLE = "GRADER_CASES"
KERNEL = "kernel"  # the file that holds the kernel's process id, from its first cell on
PASSED = "passed"
_LITTLE = 0.2  # of the time by the clock, for a solution that has run into the limit before


@dataclass(frozen=True)
class Case:
    """What is particular to one submission."""

    solutions: dict[str, str]
    seeds: dict[str, int]  # one per check that is run


@dataclass(frozen=True)
class Cases:
    """Everything that the checks of some submissions need."""

    address: str
    givens: tuple[str, ...]
    checks: tuple[CheckSource, ...]
    submissions: tuple[Case, ...]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        raw: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(
            raw["address"],
            tuple(raw["givens"]),
            tuple(CheckSource.from_dict(check) for check in raw["checks"]),
            tuple(Case(**case) for case in raw["submissions"]),
        )


class Bench:
    """The cases of one kernel, and the process that answers for their checks."""

    def __init__(self) -> None:
        folder = Path(os.environ[VARIABLE])
        self._cases = Cases.read(folder / "cases.json")
        self._notes = folder / "notes"
        self._oracle = Oracle(self._cases.address)
        self._slow: set[tuple[int, str]] = set()  # submission and solution
        # Under another name first: who reads it must find it whole.
        (folder / "starting").write_text(str(os.getpid()), encoding="utf-8")
        (folder / "starting").rename(folder / KERNEL)

    def print_verdict(self, number: int, name: str) -> None:
        """Run the check and print its verdict. Raises what makes a person have to look."""
        cases = self._cases
        source = next(check for check in cases.checks if check.name == name)
        case = cases.submissions[number]
        # One function that sleeps costs one time limit, and not one in each of its checks.
        slow = any((number, solution) in self._slow for solution in source.solutions)
        try:
            verdict = run_check(
                source,
                cases.givens,
                case.solutions,
                cases.address,
                case.seeds[name],
                oracle=self._oracle,
                patience=_LITTLE if slow else 1.0,
            )
        except Exception as error:  # whatever it is, a person reads it in the report
            why = f"{type(error).__name__}: {error}"
            self._note(number, {"check": name, "needs_human": why})
            raise
        if verdict.timed_out:
            self._slow |= {(number, solution) for solution in source.solutions}
        self._note(number, verdict.as_dict())
        print(PASSED if verdict.passed else "missed")

    def _note(self, number: int, line: dict[str, Any]) -> None:
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"submission": number, **line}) + "\n")
