"""Submissions made from the release of an assignment, for tests."""

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from grader.release import release
from grader.source import Assignment, read_assignment, source_of
from labkit.launch.scripts import project_root

ASSIGNMENTS = project_root() / "labs" / "assignments"
FIRST = ASSIGNMENTS / "01_average_gradients.ipynb"
# Of the first assignment: a visible check, a hidden one, and an answer that loses each.
_SMALL = ("intro", "tools", "imports", "task_each", "each", "model_of_the_checks")
_SMALL += ("each_average", "each_unused", "wrong_each_sum", "wrong_each_zeros")


def first_assignment() -> Assignment:
    return read_assignment(FIRST)


def with_checks(assignment: Assignment, *names: str, **changes: Any) -> Assignment:
    """The assignment with these checks only, each of them changed alike."""
    chosen = [replace(one, **changes) for one in assignment.checks if one.name in names]
    return replace(assignment, checks=tuple(chosen))


def small_assignment(folder: Path) -> Path:
    """A source notebook in `folder` that is tried in seconds: two checks, on few ranks."""
    notebook = json.loads(FIRST.read_text())
    notebook["cells"] = [one for one in notebook["cells"] if one["id"] in _SMALL]
    check = cell(notebook, "each_average")
    check["source"] = source_of(check).replace("RANKS = [2, 3, 4]", "RANKS = [2]")
    return write(notebook, folder / "small.ipynb")


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
