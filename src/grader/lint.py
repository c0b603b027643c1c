"""Try a source notebook before it is released: the key, the stubs, and every known wrong answer.

A release is refused unless the key earns every point, the empty notebook earns none, and each wrong
answer loses the checks that it names and no other. This finds a check that cannot fail, and a check
that punishes one mistake twice, before any student meets them.
"""

import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from grader.grade import Result, grade_many
from grader.merge import Submission
from grader.sandbox import RankServer
from grader.source import Assignment

# A check that fails the key with some inputs is found by trying others.
_OF_THE_KEY = ("the key", "the key with other inputs", "the key with others again")


@dataclass(frozen=True)
class Finding:
    """One trial: what was graded, what was expected, and what came out."""

    name: str
    expected: str
    found: str

    @property
    def right(self) -> bool:
        return self.expected == self.found


@dataclass(frozen=True)
class _Trial:
    name: str
    solutions: dict[str, str]
    expected: str  # empty: no points at all
    task: str | None = None  # the one solution that differs from the key


def trials_of(assignment: Assignment) -> int:
    """How many findings `lint` yields."""
    return len(_OF_THE_KEY) + 1 + len(assignment.wrong_answers)


def lint(assignment: Assignment, server: RankServer, jobs: int = 1) -> Iterator[Finding]:
    """Grade the key, the stubs, and the wrong answers, `jobs` at a time.

    Yields the findings in this order, each as soon as it and those before it are known. Raises what
    grading raises. A wrong answer is tried only on the checks that execute its solution. Each job
    takes about 2 s to start; each check of each trial takes 0.1 to 0.2 s of processor time.
    """
    trials = [_Trial(name, assignment.keys(), "loses nothing") for name in _OF_THE_KEY]
    trials.append(_Trial("the stubs", assignment.stubs(), ""))
    for wrong in assignment.wrong_answers:
        solutions = {**assignment.keys(), wrong.solution: wrong.source}
        loses = f"loses {', '.join(wrong.loses)}"
        trials.append(_Trial(wrong.name, solutions, loses, wrong.solution))
    done: queue.SimpleQueue[tuple[int, Finding] | Future[None]] = queue.SimpleQueue()

    def run(numbers: list[int]) -> None:
        submissions = [(trials[n].name, Submission(trials[n].solutions)) for n in numbers]
        # The checks of other solutions would only grade the key again.
        tasks = [trials[n].task for n in numbers]
        results = grade_many(submissions, assignment, server, tasks=tasks)
        for number, result in zip(numbers, results, strict=True):
            done.put((number, _finding(trials[number], result)))

    jobs = min(jobs, len(trials))
    known: dict[int, Finding] = {}
    following = 0
    with ThreadPoolExecutor(jobs) as pool:
        for first in range(jobs):
            pool.submit(run, list(range(len(trials)))[first::jobs]).add_done_callback(done.put)
        while following < len(trials):
            said = done.get()
            if isinstance(said, Future):
                said.result()
                continue
            known[said[0]] = said[1]
            while following in known:
                yield known[following]
                following += 1


def _finding(trial: _Trial, result: Result) -> Finding:
    if not trial.expected:
        return Finding(trial.name, "0 points", f"{result.score:g} points")
    return Finding(trial.name, trial.expected, _losses(result))


def _losses(result: Result) -> str:
    troubled = [
        f"{check.name}: {check.needs_human}" for check in result.checks if check.needs_human
    ]
    if troubled:
        return f"needs a person: {'; '.join(troubled)}"
    lost = [check.name for check in result.checks if check.score < check.points]
    return f"loses {', '.join(lost) or 'nothing'}"
