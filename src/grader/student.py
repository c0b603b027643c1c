"""In a person's own notebook: a student's visible checks, and an author's `%%check`.

Nothing is judged here. Both run the code that the notebook's kernel has executed, in ranks on the
person's own machine, without a sandbox. `validate` runs the visible checks of a saved notebook.
"""

import ast
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from grader.answer_key import SHOWN_SEED, AuthorError, could_not_run, describe, draw, run_check
from grader.inside.values import unpack
from grader.merge import read_submission
from grader.outputs import observation, text_of
from grader.sandbox import Sandbox
from grader.source import Assignment, CheckSource, Solution, SourceError, check_of, parse


class ReleasedNotebook(NamedTuple):
    """What a released notebook carries."""

    assignment: Assignment
    points: float  # of the whole assignment
    records: dict[str, dict[str, Any]]  # inputs and the key's results, by visible check


class Verdict(NamedTuple):
    """What became of a visible check on a student's machine."""

    check: CheckSource
    passed: bool
    said: str


def read_release(path: Path) -> ReleasedNotebook:
    """What the released notebook at `path` carries. Raises SourceError, OSError."""
    try:
        notebook = json.loads(path.read_bytes())
        own = notebook["metadata"]["grader"]
        checks = [CheckSource(**one["check"]) for one in own["visible"]]
        records = [unpack(base64.b64decode(one["record"])) for one in own["visible"]]
        by_check = {check.name: one for check, one in zip(checks, records, strict=True)}
        solutions = {name: Solution(name, stub, stub) for name, stub in own["stubs"].items()}
        name, title, givens = own["assignment"], own["title"], tuple(own["givens"])
        assignment = Assignment(name, title, notebook, givens, solutions, tuple(checks), ())
        return ReleasedNotebook(assignment, own["points"], by_check)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SourceError(
            f"{path} is not a released assignment: the release's own metadata are missing. "
            "Copy your functions into a fresh copy of the release."
        ) from None


def validate(path: Path) -> Iterator[Verdict]:
    """Run the visible checks of the saved notebook at `path`. Raises SourceError, SandboxError."""
    released = read_release(path)
    submission = read_submission(path, released.assignment)
    if submission.unreadable:
        raise SourceError(submission.unreadable)
    with Sandbox(trust=True) as sandbox:
        for check in released.assignment.checks:
            yield _verdict(check, released, submission.solutions, sandbox)


def _verdict(
    check: CheckSource, released: ReleasedNotebook, solutions: dict[str, str], sandbox: Sandbox
) -> Verdict:
    cells, record = released.assignment.cells(check, solutions), released.records[check.name]
    outcomes = run_check(sandbox, check, cells, record["inputs"], SHOWN_SEED)
    broken = "".join(
        f"\n{could_not_run(cell, about)}" for cell, about in outcomes[-1].failed_cells.items()
    )
    if outcomes[-1].results is None:
        return Verdict(check, False, f"not yet. It {describe(outcomes[-1], check)}.{broken}")
    for outcome, key in zip(outcomes, record["key"], strict=True):
        if differs := observation(outcome.results, key, check.tolerance):
            return Verdict(check, False, f"not yet. {check.concept} {differs}{broken}")
    return Verdict(check, True, "passed")


def check(assignment: str, name: str) -> None:
    """In a notebook: run one visible check on the code that this kernel has executed."""
    released = read_release(_notebook_of(assignment))
    checks = {one.name: one for one in released.assignment.checks}
    if name not in checks:
        raise SourceError(f"there is no visible check {name!r}; there are {', '.join(checks)}")
    solutions = {}
    for solution in checks[name].solutions:
        names = _names(released.assignment.solutions[solution].stub)
        executed = [text for text in _executed() if names & _names(text)]
        if not executed:
            print(f"Run the cell {solution} first: this kernel has not executed it yet.")
            return
        solutions[solution] = executed[-1]
    with Sandbox(trust=True) as sandbox:
        print(f"{name}: {_verdict(checks[name], released, solutions, sandbox).said}")


def _notebook_of(assignment: str) -> Path:
    """A notebook of this folder that is the named assignment. Copies carry the same checks."""
    for path in sorted(Path.cwd().glob("*.ipynb")):
        try:
            if json.loads(path.read_bytes())["metadata"]["grader"]["assignment"] == assignment:
                return path
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise FileNotFoundError(f"no notebook of the assignment {assignment!r} in {Path.cwd()}")


def _executed() -> list[str]:
    """The cells that this kernel has executed, in order."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise SourceError("this runs in a notebook; in a terminal, use python -m grader validate")
    return list(shell.user_ns.get("In", []))


def _names(source: str) -> set[str]:
    """The names that the text of a cell defines at its top level."""
    try:
        body = parse(source).body
    except (SyntaxError, ValueError):
        return set()
    assigned = [one for node in body if isinstance(node, ast.Assign) for one in node.targets]
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)} | {
        target.id for target in assigned if isinstance(target, ast.Name)
    }


_common: list[str] = []


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext grader`, for authors: makes a source notebook run from top to bottom."""
    _common.clear()
    shell.register_magic_function(_common_cell, "cell", "common")
    shell.register_magic_function(_check_cell, "cell", "check")
    shell.register_magic_function(_wrong_answer_cell, "cell", "wrong_answer")


def _common_cell(_: str, text: str) -> None:
    """`%%common`: keep the cell for the checks after it."""
    if text not in _common:
        _common.append(text)


def _wrong_answer_cell(name: str, text: str) -> None:
    """`%%wrong_answer NAME`: not executed; `release` tries it."""


def _check_cell(name: str, text: str) -> None:
    """`%%check NAME`: run the check on what this kernel has executed; print what comes back."""
    one = check_of(name, 1, text, "\n\n".join(_common) + "\n\n", f"%%check {name}")
    # The last one is this cell; cells with magics are no code of a solution.
    done = _executed()[:-1]
    cells = [[f"cell {n}", own] for n, own in enumerate(done) if not own.startswith("%")]
    with Sandbox(trust=True) as sandbox:
        try:
            inputs = draw(sandbox, [one], SHOWN_SEED)[name]
        except AuthorError as error:
            print(error)
            return
        for outcome in run_check(sandbox, one, cells, inputs, SHOWN_SEED):
            if outcome.results is None:
                print(f"the code {describe(outcome, one)}")
            else:
                print(text_of(outcome.results, None, one.tolerance))
