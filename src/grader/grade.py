"""From submissions to results: let nbval judge, and say why points are missing."""

import secrets
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grader.bench import read_outcomes, write_cases
from grader.inside.values import ValuesError
from grader.judge import judge
from grader.known import Known, Outcome, told
from grader.merge import Submission
from grader.outputs import observation, same
from grader.sandbox import CONTAINED, TRUSTED
from grader.source import Assignment, CheckSource


@dataclass
class CheckResult:
    """One line of a student's result."""

    name: str
    points: float
    score: float
    visible: bool
    sentence: str = ""  # why the points are missing; empty for what passed
    observation: str = ""  # the first difference
    line: str = ""  # the student's line that failed
    concept: str = ""  # what the check is about
    needs_human: str = ""
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
    seed: int = 0
    notes: list[str] = field(default_factory=list)  # what a person should look at
    id: str = ""  # the course system's number of the student
    warning: str = ""  # what was odd about the place or the format of the file

    @property
    def needs_human(self) -> bool:
        """Whether a check could not be judged: the submission then has no score."""
        return any(check.needs_human for check in self.checks)

    @property
    def seconds(self) -> float:
        return round(sum(check.seconds for check in self.checks), 2)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"needs_human": self.needs_human}


def fresh_seed() -> int:
    """A seed for the inputs of one run."""
    return secrets.randbits(40)


def grade_together(
    submissions: Sequence[tuple[str, Submission]],
    known: Known,
    *,
    trust: bool = False,
    shared: bool = False,
    stop: threading.Event | None = None,
) -> list[Result]:
    """Grade submissions, (student, what was read), in one run of nbval; in their order.

    An unreadable submission is not run, and earns 0. `shared`: see `write_cases`. Raises
    AuthorError for a fault of the assignment, SandboxError, and StoppedError when `stop` is set.
    """
    readable = [one for _, one in submissions if not one.unreadable]
    results = {}
    with tempfile.TemporaryDirectory(prefix="grader-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        verdicts, said = {}, ""
        if readable:
            sources = [one.solutions for one in readable]
            write_cases(folder, known, sources, trust=trust, shared=shared)
            verdicts, said = judge(folder, known, len(readable), stop or threading.Event())
        for number, one in enumerate(readable):
            passed = {check.name: verdicts.get((number, check.name)) for check in _checks(known)}
            results[id(one)] = [
                _judged(
                    check, passed[check.name], _outcomes(folder, number, check), one, known, said
                )
                for check in _checks(known)
            ]
    isolation = TRUSTED if trust else CONTAINED
    return [
        _result(student, one, known, results.get(id(one), []), isolation)
        for student, one in submissions
    ]


def _checks(known: Known) -> tuple[CheckSource, ...]:
    return known.assignment.checks


def _outcomes(folder: Path, number: int, check: CheckSource) -> tuple[list[Outcome], float]:
    try:
        return read_outcomes(folder, number, check.name) or ([], 0.0)
    except (ValuesError, TypeError, KeyError):
        return [], 0.0


Judged = tuple[CheckResult, list[Outcome]]


def _judged(
    check: CheckSource,
    passed: bool | None,
    kept: tuple[list[Outcome], float],
    submission: Submission,
    known: Known,
    said: str,
) -> Judged:
    outcomes, seconds = kept
    result = _empty(check)
    result.seconds = seconds
    if passed is None or not outcomes:
        result.needs_human = f"the check did not come to an end. {said}".strip()
    elif passed:
        result.score = check.points
    else:
        _explain(result, check, outcomes, submission, known)
    return result, outcomes


def _empty(check: CheckSource) -> CheckResult:
    return CheckResult(check.name, check.points, 0, check.visible, concept=check.concept)


def _explain(
    result: CheckResult,
    check: CheckSource,
    outcomes: list[Outcome],
    submission: Submission,
    known: Known,
) -> None:
    """Say why `check` failed: what stopped it, or whose mistake it makes, or what differs."""
    last = outcomes[-1]
    if last.results is None:
        result.sentence = _stopped(last, check)
        result.line = _line(last.stopped, submission)
        return
    result.sentence = _named(check, outcomes, known) or check.concept
    for outcome, key in zip(outcomes, known.key(check), strict=False):
        if outcome.results is not None and not result.observation:
            result.observation = _safely(outcome.results, key, check.tolerance)


def _stopped(outcome: Outcome, check: CheckSource) -> str:
    if outcome.not_written:
        return f"{' or '.join(check.solutions)} is not written yet"
    failed = [name for name in outcome.failed_cells if isinstance(name, str)]
    if failed and outcome.stopped.get("type") in ("AttributeError", "NameError"):
        return f"follows from cell {', '.join(failed)[:200]}, which could not be executed"
    return f"your code {told(outcome, check, check.visible)}"


def _safely(results: list[Any], key: list[Any], tolerance: float) -> str:
    try:
        return observation(results, key, tolerance)
    except (TypeError, ValueError, OverflowError):  # numbers of a kind that nobody expected
        return ""


def _named(check: CheckSource, outcomes: list[Outcome], known: Known) -> str:
    """The sentence of the wrong answer that returns the same in every group; empty if none does."""
    for wrong in known.assignment.wrong_answers:
        if check.name not in wrong.loses or not wrong.says:
            continue
        theirs = known.wrong(wrong, check)
        if len(theirs) == len(outcomes) and all(
            a.results is not None
            and b.results is not None
            and len(a.results) == len(b.results)
            and same(a.results, b.results, check.tolerance)
            for a, b in zip(outcomes, theirs, strict=True)
        ):
            return wrong.says
    return ""


def _line(about: dict[str, Any], submission: Submission) -> str:
    """The text of the line that failed; empty if it is in no cell of the student's."""
    cell, number = about.get("cell"), about.get("line")
    lines = submission.solutions.get(cell, "").splitlines() if isinstance(cell, str) else []
    valid = isinstance(number, int) and 0 < number <= len(lines)
    return lines[number - 1].strip()[:200] if valid else ""


def _result(
    student: str, submission: Submission, known: Known, judged: list[Judged], isolation: str
) -> Result:
    assignment = known.assignment
    checks = [check for check, _ in judged]
    if submission.unreadable:
        checks = [_empty(check) for check in assignment.checks]
        for check in checks:
            check.sentence = submission.unreadable
    return Result(
        student,
        assignment.name,
        assignment.title,
        sum(check.score for check in checks),
        assignment.points,
        checks,
        _load_errors(judged),
        list(submission.repairs),
        submission.unreadable,
        isolation,
        known.seed,
        list(submission.notes),
    )


def _load_errors(judged: list[Judged]) -> list[str]:
    """One sentence per cell that could not be executed."""
    sentences: dict[str, str] = {}
    for check, outcomes in judged:
        for outcome in outcomes:
            for cell, about in outcome.failed_cells.items():
                if not isinstance(about, dict):
                    continue
                line = f", line {about.get('line')}" if about.get("line") else ""
                detail = str(about.get("type", ""))[:100]
                message = str(about.get("message", "")).splitlines()
                if check.visible and message:
                    detail += f": {message[0][:300]}"
                text = f"cell {str(cell)[:100]} could not be executed{line}: {detail}"
                sentences[cell] = max(text, sentences.get(cell, ""), key=len)
    return list(sentences.values())


def failed_by_the_grader(student: str, assignment: Assignment, why: str) -> Result:
    """The result of a submission at which the grader itself failed."""
    checks = [_empty(check) for check in assignment.checks]
    for check in checks:
        check.needs_human = why
    return Result(student, assignment.name, assignment.title, 0, assignment.points, checks)
