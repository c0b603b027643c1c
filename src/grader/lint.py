"""Try a source notebook before it is released: the key, the stubs, and every known wrong answer.

A release is refused unless the key earns every point, the empty notebook none, and each wrong
answer loses the check that it names and no other. So a check that cannot fail is found before any
student meets it, and so is one that punishes a mistake twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from grader.grade import Result, grade_many
from grader.merge import Submission
from grader.sandbox import RankServer
from grader.source import Assignment


@dataclass(frozen=True)
class Finding:
    """One trial: who was graded, what was expected and what came out."""

    name: str
    expected: str
    found: str

    @property
    def right(self) -> bool:
        return self.expected == self.found


def lint(assignment: Assignment, server: RankServer, jobs: int = 1) -> Iterator[Finding]:
    """Grade key, stubs and wrong answers, `jobs` at a time; yields in this order."""
    trials = [
        ("the key", assignment.keys(), "loses nothing"),
        ("the stubs", assignment.stubs(), ""),
    ]
    for wrong in assignment.wrong_answers:
        solutions = {**assignment.keys(), wrong.solution: wrong.source}
        trials.append((wrong.name, solutions, f"loses {', '.join(wrong.loses)}"))

    def run(part: list[tuple[str, dict[str, str], str]]) -> list[Finding]:
        submissions = [(name, Submission(solutions)) for name, solutions, _ in part]
        results = grade_many(submissions, assignment, server)
        return [_finding(*trial, result) for trial, result in zip(part, results, strict=True)]

    jobs = min(jobs, len(trials))
    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(run, [trials[first::jobs] for first in range(jobs)]))
    for number in range(len(trials)):
        yield parts[number % jobs][number // jobs]


def _finding(name: str, solutions: dict[str, str], expected: str, result: Result) -> Finding:
    if not expected:
        return Finding(name, "0 points", f"{result.score:g} points")
    return Finding(name, expected, _losses(result))


def _losses(result: Result) -> str:
    troubled = [
        f"{check.name}: {check.needs_human}" for check in result.checks if check.needs_human
    ]
    if troubled:
        return f"needs a person: {'; '.join(troubled)}"
    lost = [check.name for check in result.checks if check.score < check.points]
    return f"loses {', '.join(lost) or 'nothing'}"
