"""Submissions made from the release of an assignment, for tests."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

from grader.release import release
from grader.source import Assignment, read_assignment, source_of
from labkit.launch.scripts import project_root

ASSIGNMENTS = project_root() / "labs" / "assignments"
FIRST = ASSIGNMENTS / "01_average_gradients.ipynb"


def first_assignment() -> Assignment:
    return read_assignment(FIRST)


def submission(assignment: Assignment, solutions: dict[str, str]) -> dict[str, Any]:
    """The release with `solutions` written into its solution cells."""
    notebook = copy.deepcopy(_released(assignment.name))
    for one in notebook["cells"]:
        one["source"] = source_of(one)
    for name, source in solutions.items():
        cell(notebook, name)["source"] = source
    return notebook


@functools.cache
def _released(name: str) -> dict[str, Any]:
    [path] = [path for path in ASSIGNMENTS.glob("*.ipynb") if path.stem.endswith(name)]
    return release(read_assignment(path), [])


def cell(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    return next(cell for cell in notebook["cells"] if cell.get("id") == name)


def write(notebook: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook))
    return path
