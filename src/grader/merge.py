"""Take a handed-in notebook apart: the source of its solution cells, and nothing else.

A cell belongs to a solution if it carries its grade_id, or else its cell id. Of several the last
that was edited counts. What is missing counts as not written. Outputs, tags, metadata, kernel,
locked cells, cells that were added: none is read, so none can matter.
"""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from grader.notebook_file import LONGEST, UnreadableError, code_cells
from grader.source import Assignment, kind_of, parse, source_of

# With these a solution can look around in its process, change what is recorded there, or
# communicate in other ways. No task needs them.
LOOKS_AROUND = {"_getframe", "_current_frames", "f_back", "f_locals", "f_globals", "tb_frame"}
LOOKS_AROUND |= {"__closure__", "__code__", "cell_contents", "__globals__", "gc", "inspect"}
LOOKS_AROUND |= {"settrace", "setprofile", "ctypes", "socket", "subprocess", "modules", "__dict__"}
LOOKS_AROUND |= {"open", "mmap", "shared_memory", "multiprocessing", "grader", "labkit", "seen"}
LOOKS_AROUND |= {
    "_disable_current_modes",
    "_get_default_store",
    "FileStore",
    "TCPStore",
    "HashStore",
}
# Cell magics whose body is Python all the same, and line magics that run the rest of their line.
_CELL_MAGIC = re.compile(r"\A\s*%%(time|timeit|capture|prun|python3?|memit|mprun)\b.*")
_TIMED = re.compile(r"^(\s*)%(?:time|timeit|prun|memit) +(?!-)", re.M)
_CALL = re.compile(r"get_ipython\(\)\.\w+\(.*\)$", re.M)


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
    submission = Submission({})
    for name, solution in assignment.solutions.items():
        submission.solutions[name] = _choose(name, solution.stub, cells, submission.notes)
        found = _looks_around(submission.solutions[name])
        if found:
            submission.notes.append(f"cell {name} uses {', '.join(found)}: a person should look")
    _compare_locked(assignment, cells, submission.notes)
    return submission


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
        notes.append(f"cell {name}: {', '.join(ignored)} was ignored: only Python is graded")
    return source


def without_magics(source: str) -> tuple[str, list[str]]:
    """`source` as Python with as many lines, and the magics and shell commands taken out of it.

    A student's notebook runs with them, so a solution must not be lost over them.
    """
    timed = _TIMED.sub(r"\1", _CELL_MAGIC.sub(lambda found: "\n" * found[0].count("\n"), source))
    if _is_python(source) or timed.lstrip().startswith("%%"):  # or of another language
        return source, []
    python = _CALL.sub("None", TransformerManager().transform_cell(timed))
    if not timed.endswith("\n"):
        python = python.removesuffix("\n")  # IPython adds it
    python = "\n" * (timed.count("\n") - python.count("\n")) + python  # IPython drops blank lines
    pairs = zip(source.split("\n"), python.split("\n"), strict=False)
    return python, [old.strip()[:40] for old, new in pairs if old != new]


def _is_python(source: str) -> bool:
    try:
        parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _looks_around(source: str) -> list[str]:
    """Which of LOOKS_AROUND `source` uses: as a name, an attribute, an import or a whole string.

    A hint for people, not a wall: a name can be hidden.
    """
    try:
        nodes = list(ast.walk(parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # it will not run either
        return []
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    # `model.modules()` is a method of every module; sys.modules is not called.
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    words |= {n.attr for n in attributes if n.attr != "modules" or id(n) not in called}
    words |= {node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    words |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    words |= {value for value in constants if isinstance(value, str)}
    return sorted(words & LOOKS_AROUND)


def _compare_locked(assignment: Assignment, cells: list[dict[str, Any]], notes: list[str]) -> None:
    """Note, for the student, that an edit of a given cell has no effect."""
    handed_in = {cell["id"]: cell["source"] for cell in cells if cell["id"]}
    for cell in assignment.notebook["cells"]:
        own = handed_in.get(cell.get("id"))
        if kind_of(cell) == "given" and own is not None and own.strip() != source_of(cell).strip():
            notes.append(f"the given cell {cell['id']} was edited: the original was used")
