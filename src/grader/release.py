"""Make the students' notebook from the source: no solutions, no hidden checks, no wrong answers.

A visible check becomes one line that a student can run; what it needs travels in the notebook's
metadata (`grader.record`), so that `grader validate` needs nothing but the notebook. A hidden check
leaves its points and one comment. nbgrader's metadata stay, for whoever uses nbgrader.
"""

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grader.check import record_check
from grader.source import Assignment, CheckSource, kind_of, source_of

_CHAPTER = re.compile(r"\[([^\]]*)\]\(\.\./\.\./book/([\w/]+)\.ipynb\)")
_PRELUDE = "from grader.student import check"
# The source folds the cells that only its author reads: JupyterLab by one, the book by the other.
_FOLDED = ("jupyter", "tags")


SEED = 1  # of the inputs that students see


def release(assignment: Assignment, address: str, book: str = "") -> dict[str, Any]:
    """The released notebook. `book`, the address of the built book, goes into its links.

    Without it a link to a chapter is its text: the chapter is not where the students are.
    The answers of visible checks are computed at the fork server `address`.
    """
    checks = {check.name: check for check in assignment.checks}
    cells = []
    for cell in copy.deepcopy(assignment.notebook["cells"]):
        kind = kind_of(cell)
        if kind in ("common", "wrong answer"):
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
    metadata = {
        **assignment.notebook.get("metadata", {}),
        "grader": {
            "assignment": assignment.name,
            "title": assignment.title,
            "points": assignment.points,
            "givens": list(assignment.givens),
            "stubs": assignment.stubs(),
            "visible": [
                asdict(record_check(check, address, SEED))
                for check in assignment.checks
                if check.visible
            ],
        },
    }
    return {**assignment.notebook, "cells": cells, "metadata": metadata}


def write_release(assignment: Assignment, path: Path, address: str, book: str = "") -> None:
    """Write the released notebook to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(release(assignment, address, book), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _line(assignment: Assignment, check: CheckSource) -> str:
    if check.visible:
        return f'{_PRELUDE}\n\ncheck("{assignment.name}", "{check.name}")'
    points = f"{check.points:g} point{'' if check.points == 1 else 's'}"
    return f"# {points}: checked with fresh inputs after you hand in."
