"""Grade one submission: take it apart, let nbval judge it, turn verdicts into points."""

from __future__ import annotations

import secrets
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grader.bench import Case
from grader.judge import judge
from grader.merge import Submission, read_submission
from grader.sandbox import RankServer
from grader.source import Assignment, CheckSource


@dataclass
class CheckResult:
    """One line of a student's result."""

    name: str
    points: float
    score: float
    visible: bool
    sentence: str = ""  # what was missed; empty for what passed
    where: str = ""
    concept: str = ""  # what the check is about
    needs_human: str = ""
    seed: int = 0
    seconds: float = 0.0


@dataclass
class Result:
    """What one submission earned, and why."""

    student: str
    assignment: str
    title: str
    score: float
    points: float
    checks: list[CheckResult]
    load_errors: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    unreadable: str = ""
    isolation: str = ""
    seconds: float = 0.0
    timed_out: bool = False  # some check ran into its limit by the clock
    notes: list[str] = field(default_factory=list)  # what a person should look at

    @property
    def needs_human(self) -> bool:
        return any(check.needs_human for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"needs_human": self.needs_human}


def grade_file(
    path: Path, student: str, assignment: Assignment, server: RankServer, *, seed: int | None = None
) -> Result:
    """Grade the notebook at `path`. With `seed` the inputs are those of an earlier run."""
    return grade(read_submission(path, assignment), student, assignment, server, seed=seed)


def grade(
    submission: Submission,
    student: str,
    assignment: Assignment,
    server: RankServer,
    *,
    seed: int | None = None,
) -> Result:
    """Grade a submission that has been read. One that is unreadable is not run, and earns 0."""
    started = time.monotonic()
    root = secrets.randbits(62) if seed is None else seed
    seeds = {check.name: root + number for number, check in enumerate(assignment.checks)}
    verdicts: dict[str, dict[str, Any]] = {}
    if not submission.unreadable:
        with tempfile.TemporaryDirectory(prefix="grader-case-") as folder:
            case = Case(
                server.address,
                assignment.givens,
                submission.solutions,
                assignment.checks,
                seeds,
                str(Path(folder) / "verdicts"),
            )
            verdicts = judge(case)
    checks = [_result(check, verdicts, submission) for check in assignment.checks]
    return Result(
        student,
        assignment.name,
        assignment.title,
        sum(check.score for check in checks),
        assignment.points,
        checks,
        _load_errors(verdicts),
        submission.repairs,
        submission.unreadable,
        server.weakest(v["isolation"] for v in verdicts.values() if "isolation" in v),
        round(time.monotonic() - started, 2),
        any(verdict.get("timed_out") for verdict in verdicts.values()),
        submission.notes,
    )


def _load_errors(verdicts: dict[str, dict[str, Any]]) -> list[str]:
    """One sentence a cell, the one of a visible check if there is one: it says more."""
    sentences: dict[str, str] = {}
    for verdict in verdicts.values():
        for cell, sentence in verdict.get("failed_cells", {}).items():
            sentences[cell] = max(sentence, sentences.get(cell, ""), key=len)
    return list(sentences.values())


def _result(
    check: CheckSource, verdicts: dict[str, dict[str, Any]], submission: Submission
) -> CheckResult:
    result = CheckResult(check.name, check.points, 0, check.visible, concept=check.concept)
    if submission.unreadable:
        result.sentence = submission.unreadable
        return result
    verdict = verdicts[check.name]
    if "needs_human" in verdict:
        result.needs_human = verdict["needs_human"]
        return result
    result.score = check.points if verdict["passed"] is True else 0
    result.sentence, result.where = verdict["sentence"], verdict["where"]
    result.seed, result.seconds = verdict["seed"], verdict["seconds"]
    return result
