"""What a student has: the visible checks, of the saved notebook, on the student's own machine.

Nothing is judged here. The same checks run as in grading, by the same code, on inputs of a fixed
seed; the hidden ones are not on the student's machine.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grader.check import Verdict, run_check
from grader.merge import Submission, read_submission
from grader.release import SEED
from grader.sandbox import rank_server
from grader.source import Assignment, CheckSource, Solution, SourceError


def read_release(path: Path) -> tuple[Assignment, float]:
    """The part of an assignment that a released notebook carries, and the points of the whole."""
    try:
        notebook = json.loads(path.read_bytes())
        own = notebook["metadata"]["grader"]
        checks = tuple(CheckSource.from_dict(check) for check in own["visible"])
        solutions = {name: Solution(name, stub, stub) for name, stub in own["stubs"].items()}
        assignment = Assignment(
            own["assignment"],
            own["title"],
            notebook,
            tuple(own["givens"]),
            solutions,
            checks,
            (),
        )
        return assignment, own["points"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SourceError(
            f"{path} is not a released assignment: the release's own metadata are missing. "
            "Copy your functions into a fresh copy of the release."
        ) from None


def validate(path: Path, only: str | None = None) -> Iterator[tuple[CheckSource, Verdict]]:
    """Run the visible checks of the notebook at `path`, or `only` one of them."""
    assignment, _ = read_release(path)
    submission = read_submission(path, assignment)
    if submission.unreadable:
        raise SourceError(submission.unreadable)
    checks = [check for check in assignment.checks if only in (None, check.name)]
    if not checks:
        raise SourceError(f"{path} has no visible check called {only!r}")
    with rank_server(trust=True) as server:
        for check in checks:
            yield check, _run(check, assignment, submission, server.address)


def _run(
    check: CheckSource, assignment: Assignment, submission: Submission, address: str
) -> Verdict:
    return run_check(check, assignment.givens, submission.solutions, address, SEED)


def describe(check: CheckSource, verdict: Verdict) -> str:
    """A line for the student."""
    lines = list(verdict.failed_cells.values())
    if verdict.passed:
        lines.append(f"{check.name}: passed")
    else:
        where = f" ({verdict.where})" if verdict.where else ""
        lines.append(f"{check.name}: not yet. {verdict.sentence}{where}")
    return "\n".join(lines)


def check(assignment: str, name: str) -> None:
    """In a notebook: run one visible check on what is saved, and print what it says."""
    path = _notebook_of(assignment)
    print(f"Checking {path.name} as it was last saved.")
    for source, verdict in validate(path, name):
        print(describe(source, verdict))


def _notebook_of(assignment: str) -> Path:
    """The notebook of this folder that is the named assignment; the one saved last of several."""
    found = []
    for path in Path.cwd().glob("*.ipynb"):
        if _assignment_of(path) == assignment:
            found.append(path)
    if not found:
        raise FileNotFoundError(f"no notebook of the assignment {assignment!r} in {Path.cwd()}")
    return max(found, key=lambda path: path.stat().st_mtime)


def _assignment_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())["metadata"]["grader"]["assignment"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
