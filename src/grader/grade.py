"""Grade submissions: let nbval judge what was read of them, turn verdicts into points."""

import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from grader.bench import Case, Cases
from grader.judge import Verdicts, judge
from grader.merge import Submission
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
    line: str = ""  # the student's line that failed
    concept: str = ""  # what the check is about
    needs_human: str = ""
    set_to: float | None = None  # by a person
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
    id: str = ""  # the course system's number of the student
    warning: str = ""  # what was odd about the place or the format of the file
    late_days: float = 0.0
    comment: str = ""  # a person's
    changed: str = ""  # what a person has set, where it differs from what the checks say
    missing: bool = False  # on the roster, and nothing handed in
    decided: bool = False  # a person has set the score of the whole

    @property
    def needs_human(self) -> bool:
        """Whether a check could not be judged, and no person has decided yet."""
        open_checks = [c for c in self.checks if c.needs_human and c.set_to is None]
        return bool(open_checks) and not self.decided

    @property
    def has_score(self) -> bool:
        """Whether it has a score. A missing submission has none until a person sets one."""
        return not self.needs_human and (self.decided or not self.missing)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"needs_human": self.needs_human}


def grade_many(
    submissions: Sequence[tuple[str, Submission]],
    assignment: Assignment,
    server: RankServer,
    *,
    seed: int | None = None,
    stop: threading.Event | None = None,
    tasks: Sequence[str | None] | None = None,
) -> Iterator[Result]:
    """Grade submissions, (student, what was read), in one run of nbval; in their order.

    With `seed` the inputs are those of an earlier run. A submission that is unreadable is not run,
    and earns 0. `tasks` holds a solution's name or None for each submission: with a name, only the
    checks that execute that solution are run and appear in the result. Raises StoppedError when
    `stop` is set.
    """
    checks = [
        [check for check in assignment.checks if task is None or task in check.solutions]
        for task in tasks or [None] * len(submissions)
    ]
    roots = [secrets.randbits(62) if seed is None else seed for _ in submissions]
    seeds = [
        {check.name: root + assignment.checks.index(check) for check in own}
        for root, own in zip(roots, checks, strict=True)
    ]
    readable = [n for n, (_, submission) in enumerate(submissions) if not submission.unreadable]
    cases = Cases(
        server.address,
        assignment.givens,
        assignment.checks,
        tuple(Case(submissions[n][1].solutions, seeds[n]) for n in readable),
    )
    judged = judge(cases, stop)
    for (student, submission), own in zip(submissions, checks, strict=True):
        verdicts = {} if submission.unreadable else next(judged)[1]
        concerned = replace(assignment, checks=tuple(own))
        yield _result(student, submission, concerned, server, verdicts)


def grade(
    submission: Submission,
    student: str,
    assignment: Assignment,
    server: RankServer,
    *,
    seed: int | None = None,
) -> Result:
    """Grade one submission: see `grade_many`."""
    return next(grade_many([(student, submission)], assignment, server, seed=seed))


def _result(
    student: str,
    submission: Submission,
    assignment: Assignment,
    server: RankServer,
    verdicts: Verdicts,
) -> Result:
    checks = [_check_result(check, verdicts, submission) for check in assignment.checks]
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
        round(sum(check.seconds for check in checks), 2),
        any(verdict.get("timed_out") for verdict in verdicts.values()),
        submission.notes,
    )


def _load_errors(verdicts: dict[str, dict[str, Any]]) -> list[str]:
    """One sentence per cell, the one of a visible check if there is one: it says more."""
    sentences: dict[str, str] = {}
    for verdict in verdicts.values():
        for cell, sentence in verdict.get("failed_cells", {}).items():
            sentences[cell] = max(sentence, sentences.get(cell, ""), key=len)
    return list(sentences.values())


def _check_result(check: CheckSource, verdicts: Verdicts, submission: Submission) -> CheckResult:
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
    result.line = verdict["line"]
    result.seed, result.seconds = verdict["seed"], verdict["seconds"]
    return result
