"""Take a handed-in notebook apart: the source of its solution cells, and nothing else.

A cell belongs to a solution if it carries its grade_id, or else its cell id. Of several the last
that was edited counts. What is missing counts as not written. Outputs, tags, metadata, kernel,
locked cells, cells that were added: none is read, so none can matter.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grader.source import Assignment, kind_of, source_of

LARGEST = 200 * 2**20  # bytes of a notebook
LONGEST = 200_000  # characters of a solution
# By these a solution looks at its caller, or into what it was handed. No task needs them, and
# what they can find in a rank's process cannot all be hidden there.
LOOKS_AROUND = {"_getframe", "_current_frames", "f_back", "f_locals", "f_globals", "tb_frame"}
LOOKS_AROUND |= {"__closure__", "cell_contents", "gc", "inspect", "settrace", "setprofile"}


@dataclass
class Submission:
    """What is graded, and what had to be put right to grade it."""

    solutions: dict[str, str]
    repairs: list[str] = field(default_factory=list)
    unreadable: str = ""  # why nothing of the file could be read
    notes: list[str] = field(default_factory=list)  # what a person should look at


def read_submission(path: str | Path, assignment: Assignment) -> Submission:
    """Read a handed-in notebook. A file that is none is a submission of stubs that says why."""
    try:
        cells = _cells(Path(path))
    except _UnreadableError as error:
        return Submission(assignment.stubs(), unreadable=str(error))
    submission = Submission({})
    for name, solution in assignment.solutions.items():
        submission.solutions[name] = _choose(name, solution.stub, cells, submission.repairs)
        found = _looks_around(submission.solutions[name])
        if found:
            submission.notes.append(f"cell {name} uses {', '.join(found)}: a person should look")
    _compare_locked(assignment, cells, submission.repairs)
    return submission


class _UnreadableError(ValueError):
    pass


def _cells(path: Path) -> list[dict[str, Any]]:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise _UnreadableError(
                f"the file has {size:,} bytes; clear its outputs and hand in again"
            )
        notebook = json.loads(path.read_bytes())
    except OSError as error:
        raise _UnreadableError(f"the file cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, _UnreadableError):
            raise
        raise _UnreadableError("the file is not a notebook: not JSON") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise _UnreadableError("the file is not a notebook of format 4: it has no list of cells")
    if notebook.get("nbformat") != 4:
        raise _UnreadableError("the file is not a notebook of format 4; save it with Jupyter again")
    return [cell for cell in notebook["cells"] if _is_code(cell)]


def _is_code(cell: Any) -> bool:
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return False
    source = cell.get("source", "")
    return isinstance(source, str) or (
        isinstance(source, list) and all(isinstance(line, str) for line in source)
    )


def _choose(name: str, stub: str, cells: list[dict[str, Any]], repairs: list[str]) -> str:
    mine = [cell for cell in cells if _grade_id(cell) == name]
    if not mine:
        mine = [cell for cell in cells if cell.get("id") == name]
        if mine:
            repairs.append(f"cell {name} had lost its grade_id: found by its cell id")
    if not mine:
        repairs.append(f"cell {name} is missing: graded as not written")
        return stub
    sources = [source_of(cell) for cell in mine]
    edited = [source for source in sources if source.strip() != stub.strip()]
    if len(sources) > 1:
        repairs.append(f"{len(sources)} cells are called {name}: the last one edited was graded")
    source = (edited or sources)[-1]
    if len(source) > LONGEST:
        repairs.append(f"cell {name} has {len(source):,} characters: graded as not written")
        return stub
    return source


def _looks_around(source: str) -> list[str]:
    """Which of LOOKS_AROUND stand in `source` as a name, an attribute, an import or a whole string.

    A hint for people, and no wall: who wants to hide a name can.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # it will not run either
        return []
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    words |= {node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    words |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    words |= {value for value in constants if isinstance(value, str)}
    return sorted(words & LOOKS_AROUND)


def _grade_id(cell: dict[str, Any]) -> Any:
    metadata = cell.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None


def _compare_locked(
    assignment: Assignment, cells: list[dict[str, Any]], repairs: list[str]
) -> None:
    """Note, for the student, that an edit of a given cell has no effect."""
    handed_in = {cell.get("id"): source_of(cell) for cell in cells if type(cell.get("id")) is str}
    for cell in assignment.notebook["cells"]:
        own = handed_in.get(cell.get("id"))
        if kind_of(cell) == "given" and own is not None and own.strip() != source_of(cell).strip():
            repairs.append(f"the given cell {cell['id']} was edited: the original was used")
