"""From submissions to results: run checks, let nbval judge, and say why points are missing."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grader.answer_key import AnswerKey, AuthorError, Outcome, could_not_run, describe, run_check
from grader.judge import judge
from grader.merge import Submission
from grader.outputs import are_same, observation, text_of
from grader.sandbox import FORKS, Sandbox, SandboxError, StoppedError
from grader.source import CheckSource

_LITTLE = 3.0  # seconds for a solution that has taken too long before


@dataclass
class CheckResult:
    """One line of a student's result."""

    name: str
    points: float
    score: float
    visible: bool
    concept: str = ""  # what the check is about
    sentence: str = ""  # why the points are missing; empty for what passed
    observation: str = ""  # the first difference
    line: str = ""  # the student's line that failed
    needs_human: str = ""
    seconds: float = 0.0


@dataclass
class Result:
    """What one submission earned, and why."""

    student: str
    assignment: str
    title: str
    points: float
    checks: list[CheckResult]
    seed: int = 0
    unreadable: str = ""
    notes: list[str] = field(default_factory=list)  # what was put right, or a person should look at
    id: str = ""  # the course system's number of the student
    warning: str = ""  # what was odd about the place or the format of the file
    in_force: str = ""  # which limits were, in a sentence

    @property
    def score(self) -> float:
        return sum(check.score for check in self.checks)

    @property
    def needs_human(self) -> bool:
        """Whether a check could not be judged: the submission then has no score."""
        return any(check.needs_human for check in self.checks)


def fresh_seed() -> int:
    """A seed for the inputs of one run."""
    return secrets.randbits(40)


def grade_together(
    submissions: Sequence[tuple[str, Submission]], answer_key: AnswerKey, teachers: bool = False
) -> list[Result]:
    """Grade submissions, (student, what was read), in one run of nbval; in their order.

    An unreadable submission is not run, and earns 0. One at which the grader itself fails needs a
    person; the others do not notice. `teachers`: all are the teacher's own, and run in the sandbox
    of the key. Raises AuthorError for a fault of the assignment, SandboxError, and StoppedError.
    """
    runs = [_Run(student, one, answer_key, teachers) for student, one in submissions]
    for run in runs:
        run.guarded(run.run_checks)
    _judge([run for run in runs if run.printed], answer_key)
    for run in runs:
        run.guarded(run.explain)
    return [run.result for run in runs]


def _judge(runs: list["_Run"], answer_key: AnswerKey) -> None:
    """Let nbval judge each check of each run, all together; if it fails, one run at a time."""
    checks = answer_key.assignment.checks
    printed = [text for run in runs for text in run.printed]
    expected = [
        "\n".join(text_of(one, None, check.tolerance) for one in answer_key.key_results(check))
        for check in checks
    ] * len(runs)
    found, said = judge(expected, printed, answer_key.stop) if runs else ({}, "")
    if len(found) < len(printed) and len(runs) > 1:
        for run in runs:
            _judge([run], answer_key)
        return
    verdicts = map(found.get, range(len(printed)))
    for run in runs:
        for result in run.result.checks:
            run.passed[result.name] = passed = next(verdicts)
            if passed is None:
                result.needs_human = f"the check did not come to an end. {said}".strip()


class _Run:
    """One submission: its result, and what its ranks did in each check."""

    def __init__(
        self, student: str, submission: Submission, answer_key: AnswerKey, teachers: bool
    ) -> None:
        self.submission, self.answer_key = submission, answer_key
        self.outcomes: dict[str, list[Outcome]] = {}
        self.printed: list[str] = []  # of each check; empty if none can be judged
        self.passed: dict[str, bool | None] = {}
        self._sandbox = None if teachers else Sandbox(answer_key.trust, answer_key.stop)
        self._slow: set[str] = set()  # solutions that have taken too long
        own, seed, why = answer_key.assignment, answer_key.seed, submission.unreadable
        checks = [
            CheckResult(c.name, c.points, 0, c.visible, c.concept, sentence=why) for c in own.checks
        ]
        about = (student, own.name, own.title, own.points, checks, seed)
        self.result = Result(*about, unreadable=why, notes=submission.notes)

    def guarded(self, action: Callable[[], None]) -> None:
        """Do it; where the grader itself fails, all checks need a person."""
        try:
            action()
        except (StoppedError, SandboxError, AuthorError):
            raise
        except Exception as error:
            self.printed = []
            for result in self.result.checks:
                result.needs_human = f"{type(error).__name__}: {error}"

    def run_checks(self) -> None:
        """Run every check, and end the sandbox with all that runs there."""
        try:
            if not self.submission.unreadable:
                self.printed = [self._check(one) for one in self.answer_key.assignment.checks]
            self.result.in_force = FORKS[self.answer_key.trust].in_force
        finally:
            if self._sandbox:
                self._sandbox.end()

    def explain(self) -> None:
        """Give the points of what has passed, and say why the others are missing."""
        for result, check in zip(
            self.result.checks, self.answer_key.assignment.checks, strict=True
        ):
            if self.passed.get(check.name):
                result.score = check.points
            elif self.printed and not result.needs_human:
                _explain(result, check, self)

    def _check(self, check: CheckSource) -> str:
        """What the ranks of one check return, as text."""
        started = time.monotonic()
        outcomes = self.outcomes[check.name] = self._outcomes(check)
        result = next(one for one in self.result.checks if one.name == check.name)
        result.seconds = time.monotonic() - started
        if outcomes[-1].timed_out:
            self._slow |= set(check.solutions)
        key = self.answer_key.key_results(check)
        lines = [
            text_of(outcome.results, expected, check.tolerance)
            for outcome, expected in zip(outcomes, key, strict=False)
            if outcome.results is not None
        ]
        if outcomes[-1].results is None:
            lines.append(f"{check.name}: {describe(outcomes[-1], check)}")
        return "\n".join(lines)

    def _outcomes(self, check: CheckSource) -> list[Outcome]:
        assignment, own = self.answer_key.assignment, self.submission.solutions
        stubs = assignment.stubs()
        if any(
            own[name].strip() == stubs[name].strip() and "raise NotImplementedError" in stubs[name]
            for name in check.solutions
        ):  # it need not be run
            return [Outcome(stopped={"how": "raised", "type": "NotImplementedError"})]
        if self._sandbox is None:
            return self.answer_key.outcomes(check, own)
        seconds = _LITTLE if self._slow & set(check.solutions) else None
        inputs, key = self.answer_key.inputs(check), self.answer_key.key_results(check)
        about = (assignment.cells(check, own), inputs, self.answer_key.seed, seconds, key)
        return run_check(self._sandbox, check, *about)


def _explain(result: CheckResult, check: CheckSource, run: _Run) -> None:
    """Say why `check` failed: what stopped it, or whose mistake it makes, or what differs."""
    outcomes = run.outcomes[check.name]
    last = outcomes[-1]
    broken = [could_not_run(cell, about) for cell, about in last.failed_cells.items()]
    if last.results is not None:
        result.sentence = (
            "; ".join(broken) or _named(check, outcomes, run.answer_key) or check.concept
        )
        for outcome, key in zip(outcomes, run.answer_key.key_results(check), strict=False):
            found = observation(outcome.results or [], key, check.tolerance)
            result.observation = result.observation or found
        return
    result.line = _line(last.stopped, run.submission)
    if last.not_written:
        result.sentence = f"{' or '.join(check.solutions)} is not written yet"
    elif broken and last.stopped.get("type") in ("AttributeError", "NameError"):
        result.sentence = "; ".join(broken)
    else:
        result.sentence = f"your code {describe(last, check)}"


def _named(check: CheckSource, outcomes: list[Outcome], answer_key: AnswerKey) -> str:
    """The sentence of the wrong answer that returns the same in every group; empty if none does."""
    for wrong in answer_key.assignment.wrong_answers:
        if check.name not in wrong.loses or not wrong.says:
            continue
        solutions = answer_key.assignment.keys() | {wrong.solution: wrong.source}
        theirs = answer_key.outcomes(check, solutions)
        if len(theirs) == len(outcomes) and all(
            b.results is not None and are_same(a.results, b.results, check.tolerance)
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
