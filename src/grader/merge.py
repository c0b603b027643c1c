"""Take a handed-in notebook apart: the source of its solution cells, and nothing else.

A cell belongs to a solution if it carries its grade_id, or else its cell id. Of several the last
that was edited counts. What is missing counts as not written. Outputs, tags, metadata, kernel,
locked cells, cells that were added: none is read, so none can matter.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grader.allowed import first_few, unusual
from grader.notebook_file import LONGEST, UnreadableError, code_cells
from grader.source import Assignment, kind_of, parse, source_of

# Cell magics whose body is another language; the body of any other is Python all the same.
_OTHER_LANGUAGE = re.compile(
    r"\s*%%(bash|sh|script|cmd|html|HTML|javascript|js|latex|markdown|perl|ruby|svg|SVG|system|sx|!)"
)
_CELL_MAGIC = re.compile(r"\s*%%\w.*")
# Line magics that run the rest of their line, and what is a magic, a shell command, or a question.
_TIMED = re.compile(r"(\s*)%(?:time|timeit|prun|memit) +(?!-)(.*)")
_MAGIC = re.compile(
    r"(\s*)(?:(\w[\w, ]*=\s*)(?:%(?=[a-zA-Z])|!)|%(?=[a-zA-Z])|!|\?|[\w.*]+\?{1,2}\s*$).*"
)
_MOST_MAGICS = 100  # of a cell; each is one more try to parse it


@dataclass
class Submission:
    """What is graded, and what had to be put right to grade it."""

    solutions: dict[str, str]
    notes: list[str] = field(default_factory=list)  # what was put right, or a person should look at
    unreadable: str = ""  # why nothing of the file could be read


def read_submission(path: str | Path, assignment: Assignment) -> Submission:
    """Read a handed-in notebook. A file that is none is a submission of stubs that says why."""
    try:
        cells = code_cells(Path(path))
    except UnreadableError as error:
        return Submission(assignment.stubs(), unreadable=str(error))
    submission, known = Submission({}), known_to(assignment)
    for name, solution in assignment.solutions.items():
        submission.solutions[name] = _choose(name, solution.stub, cells, submission.notes)
        if submission.solutions[name] != solution.stub and (
            found := unusual(submission.solutions[name], known)
        ):
            submission.notes.append(f"cell {name}, {'; '.join(found)}: a person should look")
    _compare_locked(assignment, cells, submission.notes)
    return submission


def known_to(assignment: Assignment) -> str:
    """The teacher's code, whose names a solution may use: what is given, and what checks call."""
    checks = [check.source for check in assignment.checks]
    return "\n".join([*assignment.givens, *assignment.stubs().values(), *checks])


def _choose(name: str, stub: str, cells: list[dict[str, Any]], notes: list[str]) -> str:
    mine = [cell for cell in cells if cell["grade_id"] == name]
    if not mine:
        mine = [cell for cell in cells if cell["id"] == name]
        if mine:
            notes.append(f"cell {name} had lost its grade_id: found by its cell id")
    if not mine:
        notes.append(f"cell {name} is missing: graded as not written")
        return stub
    edited = [cell for cell in mine if cell["source"].strip() != stub.strip()]
    if len(mine) > 1:
        notes.append(f"{len(mine)} cells are called {name}: the last one edited was graded")
    chosen = (edited or mine)[-1]
    if chosen["length"] > LONGEST:
        notes.append(f"cell {name} has {chosen['length']:,} characters: graded as not written")
        return stub
    source, ignored = without_magics(chosen["source"])
    if ignored:
        told = ", ".join(first_few(ignored))
        notes.append(f"cell {name}: {told} was ignored: only Python is graded")
    return source


def without_magics(source: str) -> tuple[str, list[str]]:
    """`source` as Python with as many lines, and the magics and shell commands taken out of it.

    A student's notebook runs with them, so a solution must not be lost over them. A magic is where
    Python's parser finds an error: none is in a string, or continues a line.
    """
    if _OTHER_LANGUAGE.match(source):
        return source, []
    lines, ignored = source.split("\n"), []
    for _ in range(_MOST_MAGICS):
        try:
            parse("\n".join(lines))
            break
        except SyntaxError as error:
            number = min(error.lineno or 1, len(lines)) - 1
        except (ValueError, RecursionError, MemoryError):
            break
        if _CELL_MAGIC.fullmatch(lines[number]) and not "".join(lines[:number]).strip():
            new = ""
        elif timed := _TIMED.fullmatch(lines[number]):
            new = timed[1] + timed[2]
        elif magic := _MAGIC.fullmatch(lines[number]):
            new = f"{magic[1]}{magic[2] or ''}None"
        else:
            break
        ignored.append(lines[number].strip()[:40])
        lines[number] = new
    return "\n".join(lines), ignored


def _compare_locked(assignment: Assignment, cells: list[dict[str, Any]], notes: list[str]) -> None:
    """Note, for the student, that an edit of a given cell has no effect."""
    handed_in = {cell["id"]: cell["source"] for cell in cells if cell["id"]}
    for cell in assignment.notebook["cells"]:
        own = handed_in.get(cell.get("id"))
        if kind_of(cell) == "given" and own is not None and own.strip() != source_of(cell).strip():
            notes.append(f"the given cell {cell['id']} was edited: the original was used")
