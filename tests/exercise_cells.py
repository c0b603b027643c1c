"""The checks of the chapters' exercises, without the rest of the chapters.

A check is called in the state that it has in its chapter, but that would take as long as the whole
chapter. So of the cells up to the check only the statements run that the check or an answer needs:
those that define a name that is needed, and calls of it or of its methods (`torch.manual_seed(0)`,
`model.eval()`).
"""

import ast
import contextlib
import dis
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import nbformat

from labkit.book.chapters import chapters_of
from labkit.launch import project_root

SOLUTION = re.compile(r"^# %% (check_\w+) (right|wrong): (.+)$", re.M)


class Solution(NamedTuple):
    """An answer to try a check on: what a reader could have written."""

    check: str
    expected: str  # "right" or "wrong"
    title: str
    source: str


def blind_spots_of(chapter: Path, check: str) -> list[str]:
    """Patterns of the titles of mutants that `check` need not see: `# %% check blind: reason`."""
    file = chapter.with_suffix(".solutions.py")
    return re.findall(rf"^# %% {check} blind (.+?): .+$", file.read_text(), re.M)


def said_to(answer: Any, check: Callable[[Any], None]) -> str:
    """What the check prints, and the exception that it lets through."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            check(answer)
        except Exception as error:
            return f"{said.getvalue().strip()} {type(error).__name__}: {error}"
    return said.getvalue().strip()


class Statement(NamedTuple):
    """A statement at the top level of a cell, and the names that it needs and binds."""

    code: CodeType
    needs: set[str]
    binds: set[str]


def solutions_of(chapter: Path) -> list[Solution]:
    """The answers in `NAME.solutions.py` beside the chapter: cells that begin with `# %%`.

    A cell without code has changes of the check's first right answer: `# old → new`, and perhaps
    more lines of what is new.
    """
    file = chapter.with_suffix(".solutions.py")
    if not file.exists():
        return []
    _, *parts = SOLUTION.split(file.read_text())
    found = [Solution(*parts[i : i + 4]) for i in range(0, len(parts), 4)]
    first = {s.check: s.source for s in found[::-1] if s.expected == "right"}
    return [
        s if ast.parse(s.source).body else s._replace(source=_changed(first[s.check], s.source))
        for s in found
    ]


def _changed(right: str, changes: str) -> str:
    lines = "\n".join(re.findall(r"^# (?!%%)(.*)$", changes, re.M))
    for old, new in re.findall(r"^(.+?) →\s?(.*(?:\n(?!.+ →).*)*)", lines, re.M):
        assert right.count(old) == 1, f"{old} is {right.count(old)} times in\n{right}"
        right = right.replace(old, new)
    return right


def checks_of(chapter: Path) -> list[str]:
    """The names of the chapter's checks, in order."""
    return re.findall(r"^@checker\ndef (check_\w+)", "\n".join(code_of(chapter)), re.M)


def state_for(chapter: Path, check: str, sources: list[str]) -> dict[str, Any]:
    """The names that `check` and the cells `sources` find in the chapter."""
    cells = code_of(chapter)
    last = next(n for n, cell in enumerate(cells) if f"@checker\ndef {check}(" in cell)
    statements = [s for cell in cells[: last + 1] for s in _statements(cell)]
    needed = {check}.union(*(s.needs for source in sources for s in _statements(source)))
    chosen: list[Statement] = []
    while more := [s for s in statements if s not in chosen and s.binds & needed]:
        chosen += more
        needed = needed.union(*(s.needs for s in more))
    state: dict[str, Any] = {"__name__": "__main__"}
    for statement in statements:
        if statement in chosen:
            exec(statement.code, state)
    return state


def answer_in(solution: Solution, state: dict[str, Any]) -> Any:
    """The last name that the solution's cell binds: it runs with the names of `state`."""
    names = dict(state)
    for statement in _statements(solution.source):
        exec(statement.code, names)
    last = ast.parse(solution.source).body[-1]
    return names[last.targets[0].id if isinstance(last, ast.Assign) else last.name]


def code_of(chapter: Path) -> list[str]:
    """The code cells of a chapter, without IPython's magic lines."""
    cells = nbformat.read(chapter, as_version=4).cells
    return [
        re.sub(r"^%.*$", "", cell.source, flags=re.M) for cell in cells if cell.cell_type == "code"
    ]


def _statements(cell: str) -> Iterator[Statement]:
    for node in ast.parse(cell).body:
        code = compile(ast.Module([node], []), "<cell>", "exec")
        binds = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            while isinstance(called, ast.Attribute | ast.Call):
                called = called.value if isinstance(called, ast.Attribute) else called.func
            is_check = isinstance(called, ast.Name) and called.id.startswith("check_")
            binds = set() if is_check or not isinstance(called, ast.Name) else {called.id}
        yield Statement(code, set(_loads(code)), binds)


def _loads(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loads(constant)


CHECKS = [
    (chapter, check)
    for chapter in chapters_of(project_root() / "book")
    for check in checks_of(chapter)
]
