"""Release an assignment: try it first, then write the students' notebook.

The trial finds a check that cannot fail, and one that punishes a mistake twice. The key must earn
every point, the empty notebook none, and each wrong answer must lose the checks that it names and
no other. The students' notebook has no solutions, no hidden checks, and no wrong answers. A visible
check becomes one line that a student can run; its inputs, and what the key returns for them, travel
in the notebook's metadata.
"""

import base64
import copy
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grader.grade import Result, fresh_seed, grade_together
from grader.inside.values import pack
from grader.known import Known
from grader.merge import Submission
from grader.report import sentence_of
from grader.source import Assignment, CheckSource, kind_of, source_of

SEED = 1  # of the inputs that students see
_CHAPTER = re.compile(r"\[([^\]]*)\]\(\.\./\.\./book/([\w/]+)\.ipynb\)")
# The source folds the cells that only its author reads: JupyterLab by one, the book by the other.
_FOLDED = ("jupyter", "tags")


@dataclass(frozen=True)
class Finding:
    """One trial: what was graded, whether it earned what it should, and what a student reads."""

    name: str
    right: bool
    found: str
    expected: str
    reads: list[str]


def lint(assignment: Assignment, trust: bool = False) -> Iterator[Finding]:
    """Grade the key twice, on two seeds, the stubs, and the wrong answers; yield the findings.

    Raises AuthorError, SandboxError. Costs about 1 s per trial, and 4 s to start.
    """
    keys = assignment.keys()
    with Known(assignment, fresh_seed(), trust) as known:
        trials = [("the key", keys), ("the stubs", assignment.stubs())]
        for wrong in assignment.wrong_answers:
            trials.append((wrong.name, keys | {wrong.solution: wrong.source}))
        loses = {wrong.name: wrong.loses for wrong in assignment.wrong_answers}
        submissions = [(name, Submission(solutions)) for name, solutions in trials]
        for result in grade_together(submissions, known, trust=trust, shared=True):
            yield _finding(result, loses.get(result.student, ()))
    with Known(assignment, fresh_seed(), trust) as known:
        again = [("the key with other inputs", Submission(keys))]
        yield _finding(grade_together(again, known, trust=trust, shared=True)[0], ())


def _finding(result: Result, loses: tuple[str, ...]) -> Finding:
    lost = [check for check in result.checks if check.score < check.points or check.needs_human]
    reads = [f"{check.name}: {check.needs_human or sentence_of(check)}" for check in lost]
    if result.student == "the stubs":
        found = f"{result.score:g} points"
        return Finding(result.student, result.score == 0, found, "0 points", [])
    found = f"loses {', '.join(check.name for check in lost) or 'nothing'}"
    expected = f"loses {', '.join(loses) or 'nothing'}"
    right = {check.name for check in lost} == set(loses) and not result.needs_human
    return Finding(result.student, right, found, expected, reads + result.load_errors)


def release(
    assignment: Assignment, visible: list[dict[str, Any]], book: str = ""
) -> dict[str, Any]:
    """The students' notebook, with the visible checks as `record_visible` returns them.

    `book`, the address of the built book, goes into its links. Without it a link to a chapter is
    its text: the chapter is not where the students are.
    """
    checks = {check.name: check for check in assignment.checks}
    cells = []
    for cell in copy.deepcopy(assignment.notebook["cells"]):
        kind = kind_of(cell)
        if kind in ("tools", "common", "wrong answer"):
            continue
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        grade_id = cell["metadata"].get("nbgrader", {}).get("grade_id")
        if kind == "solution":
            cell["source"] = assignment.solutions[grade_id].stub
        elif kind == "check":
            cell["source"] = _line(assignment, checks[grade_id])
            cell["metadata"] = {k: v for k, v in cell["metadata"].items() if k not in _FOLDED}
        if cell["cell_type"] == "markdown":
            link = rf"[\1]({book.rstrip('/')}/\2.html)" if book else r"\1"
            cell["source"] = _CHAPTER.sub(link, source_of(cell))
        cells.append(cell)
    own = {
        "assignment": assignment.name,
        "title": assignment.title,
        "points": assignment.points,
        "givens": list(assignment.givens),
        "stubs": assignment.stubs(),
        "visible": visible,
    }
    metadata = {**assignment.notebook.get("metadata", {}), "grader": own}
    return {**assignment.notebook, "cells": cells, "metadata": metadata}


def record_visible(assignment: Assignment, trust: bool = False) -> list[dict[str, Any]]:
    """Each visible check, with inputs and what the key returns for them."""
    with Known(assignment, SEED, trust) as known:
        return [
            {
                "check": asdict(check),
                "record": base64.b64encode(
                    pack({"inputs": known.inputs(check), "key": known.key(check)})
                ).decode(),
            }
            for check in assignment.checks
            if check.visible
        ]


def write_release(assignment: Assignment, path: Path, book: str = "", trust: bool = False) -> None:
    """Write the students' notebook to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    notebook = release(assignment, record_visible(assignment, trust), book)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _line(assignment: Assignment, check: CheckSource) -> str:
    if check.visible:
        name = f'"{assignment.name}", "{check.name}"'
        return f"from grader.student import check\n\ncheck({name})"
    points = f"{check.points:g} point{'' if check.points == 1 else 's'}"
    return f"# {points}: checked with fresh inputs after you hand in."
