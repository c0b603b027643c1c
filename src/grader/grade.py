"""From submissions to results: run checks, let nbval judge, and say why points are missing."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grader.answer_key import AnswerKey, Outcome, could_not_run, describe, run_check
from grader.judge import judge
from grader.merge import Submission
from grader.outputs import are_same, observation, text_of
from grader.sandbox import Sandbox
from grader.source import Assignment, CheckSource

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

    @property
    def score(self) -> float:
        return sum(check.score for check in self.checks)

    @property
    def needs_human(self) -> bool:
        """Whether a check could not be judged: the submission then has no score."""
        return any(check.needs_human for check in self.checks)

    @property
    def seconds(self) -> float:
        return round(sum(check.seconds for check in self.checks), 2)


def fresh_seed() -> int:
    """A seed for the inputs of one run."""
    return secrets.randbits(40)


def grade_together(
    submissions: Sequence[tuple[str, Submission]], answer_key: AnswerKey, teachers: bool = False
) -> list[Result]:
    """Grade submissions, (student, what was read), in one run of nbval; in their order.

    An unreadable submission is not run, and earns 0. `teachers`: all are the teacher's own, and run
    in the sandbox of the key. Raises AuthorError for a fault of the assignment, SandboxError, and
    StoppedError.
    """
    own, results = answer_key.assignment, []
    runs = [
        _Run(one, answer_key, None if teachers else answer_key.sandbox()) for _, one in submissions
    ]
    readable = [run for run in runs if not run.submission.unreadable]
    verdicts, said = _judge(readable, answer_key) if readable else (iter(()), "")
    for (student, one), run in zip(submissions, runs, strict=True):
        if one.unreadable:
            checks = [replace(_empty(check), sentence=one.unreadable) for check in own.checks]
        else:
            checks = [_judged(check, next(verdicts), run, said) for check in own.checks]
        about = (answer_key.seed, one.unreadable, one.notes)
        results.append(Result(student, own.name, own.title, own.points, checks, *about))
    return results


def _judge(runs: list["_Run"], answer_key: AnswerKey) -> tuple[Iterator[bool | None], str]:
    """nbval's verdict on each check of each run, None where it failed; and what it said then."""
    checks = answer_key.assignment.checks
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.callback(run.end)
        expected = [answer_key.expected(check) for check in checks] * len(runs)
        nbval = stack.enter_context(judge(expected))
        places = iter(range(len(expected)))
        for run in runs:
            for check in checks:
                nbval.submit(next(places), run.check(check))
            run.end()
        found, said = nbval.verdicts(answer_key.stop)
    return map(found.get, range(len(expected))), said


class _Run:
    """One submission in its sandbox: what its ranks did in each check."""

    def __init__(
        self, submission: Submission, answer_key: AnswerKey, sandbox: Sandbox | None
    ) -> None:
        self.submission, self.answer_key, self._sandbox = submission, answer_key, sandbox
        self.outcomes: dict[str, list[Outcome]] = {}
        self.seconds: dict[str, float] = {}
        self._slow: set[str] = set()  # solutions that have taken too long

    def end(self) -> None:
        """End its sandbox, with all that runs there."""
        if self._sandbox:
            self._sandbox.end()

    def check(self, check: CheckSource) -> str:
        """Run `check`; returns what is to be printed."""
        started = time.monotonic()
        outcomes = self.outcomes[check.name] = self._outcomes(check)
        self.seconds[check.name] = time.monotonic() - started
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
        if self._not_written(check):
            return [Outcome(stopped={"how": "raised", "type": "NotImplementedError"})]
        if self._sandbox is None:
            return self.answer_key.outcomes(check, self.submission.solutions)
        cells = self.answer_key.assignment.cells(check, self.submission.solutions)
        seconds = _LITTLE if self._slow & set(check.solutions) else None
        inputs, seed, key = (
            self.answer_key.inputs(check),
            self.answer_key.seed,
            self.answer_key.key_results(check),
        )
        return run_check(self._sandbox, check, cells, inputs, seed, seconds, key)

    def _not_written(self, check: CheckSource) -> bool:
        """Whether a solution is the stub that only raises: it need not be run."""
        stubs, own = self.answer_key.assignment.stubs(), self.submission.solutions
        return any(
            own[name].strip() == stubs[name].strip() and "raise NotImplementedError" in stubs[name]
            for name in check.solutions
        )


def _empty(check: CheckSource) -> CheckResult:
    return CheckResult(check.name, check.points, 0, check.visible, check.concept)


def _judged(check: CheckSource, passed: bool | None, run: _Run, said: str) -> CheckResult:
    result = _empty(check)
    result.seconds = run.seconds[check.name]
    if passed is None:
        result.needs_human = f"the check did not come to an end. {said}".strip()
    elif passed:
        result.score = check.points
    else:
        _explain(result, check, run)
    return result


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
            result.observation = result.observation or _observed(outcome.results, key, check)
        return
    result.line = _line(last.stopped, run.submission)
    if last.not_written:
        result.sentence = f"{' or '.join(check.solutions)} is not written yet"
    elif broken and last.stopped.get("type") in ("AttributeError", "NameError"):
        result.sentence = "; ".join(broken)
    else:
        result.sentence = f"your code {describe(last, check)}"


def _observed(results: list[Any] | None, key: list[Any], check: CheckSource) -> str:
    try:
        return observation(results or [], key, check.tolerance)
    except (TypeError, ValueError, OverflowError):  # numbers of a kind that nobody expected
        return ""


def _named(check: CheckSource, outcomes: list[Outcome], answer_key: AnswerKey) -> str:
    """The sentence of the wrong answer that returns the same in every group; empty if none does."""
    for wrong in answer_key.assignment.wrong_answers:
        if check.name not in wrong.loses or not wrong.says:
            continue
        theirs = answer_key.wrong_outcomes(wrong, check)
        if len(theirs) == len(outcomes) and all(
            b.results is not None
            and len(a.results) == len(b.results)
            and are_same(a.results, b.results, check.tolerance)
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


def failed_by_the_grader(student: str, own: Assignment, why: str) -> Result:
    """The result of a submission at which the grader itself failed."""
    checks = [replace(_empty(check), needs_human=why) for check in own.checks]
    return Result(student, own.name, own.title, own.points, checks)
