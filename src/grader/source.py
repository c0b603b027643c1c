"""The one source notebook of an assignment: what is given, asked, checked, and known as wrong.

A cell says what it is in its metadata, under "grader": {"kind": …}:

    tools          `%load_ext grader`, which makes %%check and %%common work in the source notebook
    given          code that every solution may use; locked; executed before any solution
    solution       the key, with the part that the student writes between the marks
                   ### BEGIN SOLUTION and ### END SOLUTION
    common         code that every check may use: put before each of them; never on a student's page
    check          a check: points, and two functions
    wrong answer   a known wrong solution, and the checks that it has to lose

A code cell has one of these kinds; any other cell is text. Solutions and checks carry nbgrader's
metadata besides (schema 3). book/teach/teach.md describes the format for authors.

A check defines `draw(rng, ranks)`, a list with each rank's own input, and
`on_rank(student, given)`, what a rank returns. What is right is what the key returns.
"""

import ast
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 3
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
RELEASED_AS = "### RELEASED AS"
KINDS = ("tools", "given", "solution", "common", "check", "wrong answer")
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_PARSING = threading.Lock()
_SETTINGS = {"SOLUTIONS": list, "VISIBLE": bool, "RANKS": list, "TOLERANCE": float, "SECONDS": int}


class SourceError(ValueError):
    """The notebook is not a valid source: what was found, in which cell, and what to do."""


@dataclass(frozen=True)
class Solution:
    """One solution cell. Its `key` is the instructor's, its `stub` what a release shows."""

    name: str
    key: str
    stub: str


@dataclass(frozen=True)
class CheckSource:
    """One check cell: its text, and the settings that it defines as constants."""

    name: str
    points: float
    source: str
    concept: str  # the cell's docstring: what a student who loses it has not understood yet
    solutions: Sequence[str]  # SOLUTIONS: the solution cells that are executed for it
    visible: bool = False  # VISIBLE: students can run it
    ranks: Sequence[int] = ()  # RANKS: on each, until it is lost; otherwise on 2, 3, or 4
    tolerance: float = 1e-4  # TOLERANCE: largest difference, relative to the largest value
    seconds: int = 12  # SECONDS by the clock that the ranks may take

    @property
    def worth(self) -> str:
        return f"{self.points:g} point{'' if self.points == 1 else 's'}"


@dataclass(frozen=True)
class WrongAnswer:
    """A solution cell that is wrong in a known way, and the checks that it loses, no others."""

    name: str
    solution: str
    source: str
    loses: tuple[str, ...]
    says: str = ""  # what a student reads whose solution returns the same


@dataclass(frozen=True)
class Assignment:
    """Everything that the source notebook says."""

    name: str
    title: str
    notebook: dict[str, Any] = field(repr=False)
    givens: tuple[str, ...] = field(repr=False)
    solutions: dict[str, Solution] = field(repr=False)
    checks: tuple[CheckSource, ...] = field(repr=False)
    wrong_answers: tuple[WrongAnswer, ...] = field(repr=False)

    @property
    def points(self) -> float:
        return sum(check.points for check in self.checks)

    def keys(self) -> dict[str, str]:
        """The instructor's solutions, by name."""
        return {name: solution.key for name, solution in self.solutions.items()}

    def stubs(self) -> dict[str, str]:
        """The solutions of an empty release, by name."""
        return {name: solution.stub for name, solution in self.solutions.items()}

    def cells(self, check: CheckSource, solutions: dict[str, str]) -> list[list[str]]:
        """What a rank executes for `check`, [name, source] each: given cells, then solutions."""
        givens = [[f"given {number}", source] for number, source in enumerate(self.givens, 1)]
        return givens + [[name, solutions[name]] for name in check.solutions]


def read_assignment(path: str | Path) -> Assignment:
    """Read and check a source notebook. Raises SourceError, OSError."""
    path = Path(path)
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise SourceError(f"{path} is not a notebook: not JSON") from None
    if not isinstance(notebook, dict) or notebook.get("nbformat") != 4:
        raise SourceError(f"{path} is not a notebook of format 4")
    own = notebook.get("metadata", {}).get("grader", {})
    for key in ("assignment", "title"):
        if not isinstance(own.get(key), str):
            raise SourceError(f'{path}: the notebook\'s metadata need "grader": {{"{key}": "…"}}')
    reader = _Reader()
    for number, cell in enumerate(notebook["cells"]):
        reader.read(cell, f"{path.name}, cell {number} ({cell.get('id', 'without an id')})")
    reader.look_at_references(path)
    return Assignment(
        own["assignment"],
        own["title"],
        notebook,
        tuple(reader.givens),
        reader.solutions,
        tuple(reader.checks.values()),
        tuple(wrong for wrong, _ in reader.wrong),
    )


class _Reader:
    """What the cells read so far have said."""

    def __init__(self) -> None:
        self.givens: list[str] = []
        self.common = ""
        self.solutions: dict[str, Solution] = {}
        self.checks: dict[str, CheckSource] = {}
        self.wrong: list[tuple[WrongAnswer, str]] = []
        self.places: dict[str, str] = {}

    def read(self, cell: dict[str, Any], where: str) -> None:
        kind, text = kind_of(cell, where), source_of(cell)
        if kind == "given":
            self.givens.append(text)
        elif kind == "common":
            self.common += _without_magic(text, "%%common", where) + "\n\n"
        elif kind == "solution":
            name = self._new(cell, where)
            self.solutions[name] = _read_solution(name, text, where)
        elif kind == "check":
            name = self._new(cell, where)
            self.checks[name] = _read_check(name, cell, text, self.common, where)
        elif kind == "wrong answer":
            self.wrong.append((_read_wrong_answer(cell, text, where), where))
        elif kind is None and cell.get("cell_type") == "code" and text.strip():
            raise SourceError(f'{where}: code needs "grader": {{"kind": one of {KINDS}}}')

    def _new(self, cell: dict[str, Any], where: str) -> str:
        """The grade_id of a cell, which no other one has."""
        nbgrader = cell.get("metadata", {}).get("nbgrader", {})
        name = nbgrader.get("grade_id")
        if nbgrader.get("schema_version") != SCHEMA or not isinstance(name, str):
            raise SourceError(f"{where}: needs nbgrader's metadata, schema {SCHEMA}, with grade_id")
        if not _NAME.match(name):
            raise SourceError(f"{where}: grade_id {name!r}; use small letters, digits and _")
        if cell.get("id") != name:
            raise SourceError(f"{where}: the cell's id has to be its grade_id, {name!r}")
        if name in self.places:
            raise SourceError(f"{where}: {name!r} is also {self.places[name]}")
        self.places[name] = where
        return name

    def look_at_references(self, path: Path) -> None:
        if not self.checks or not self.solutions:
            raise SourceError(f"{path} has no check, or no solution: is it a source notebook?")
        for check in self.checks.values():
            for name in set(check.solutions) - self.solutions.keys():
                where = self.places[check.name]
                raise SourceError(f"{where}: SOLUTIONS names {name!r}, which is no solution")
        for wrong, where in self.wrong:
            if wrong.solution not in self.solutions:
                raise SourceError(f"{where}: replaces {wrong.solution!r}, which is no solution")
            for name in wrong.loses:
                if name not in self.checks or wrong.solution not in self.checks[name].solutions:
                    raise SourceError(f"{where}: loses {name!r}: no check of {wrong.solution!r}")


def kind_of(cell: dict[str, Any], where: str = "a cell") -> str | None:
    """The kind that the cell's metadata names. Raises SourceError for an unknown one."""
    kind = cell.get("metadata", {}).get("grader", {}).get("kind")
    if kind is not None and kind not in KINDS:
        raise SourceError(f"{where}: kind {kind!r}; there are {', '.join(KINDS)}")
    return kind


def source_of(cell: dict[str, Any]) -> str:
    """The text of a cell, which a file may hold as one string or as lines."""
    source = cell.get("source", "")
    return "".join(source) if isinstance(source, list) else source


def _without_magic(text: str, magic: str, where: str) -> str:
    """Without the first line, a cell magic that only a notebook understands."""
    first, _, rest = text.partition("\n")
    if first.strip() != magic:
        raise SourceError(f"{where}: the first line has to be {magic!r}, as the metadata say")
    return "\n" + rest


def key_and_stub(text: str, where: str = "a solution") -> tuple[str, str]:
    """A solution cell without its marks, and what is released: each marked part left to write.

    Or what stands, commented out, between ### RELEASED AS and ### END SOLUTION: code to fix.
    """
    key, stub, inside, instead, found = [], [], False, None, False
    for line in text.splitlines():
        mark, indent = line.strip(), line[: len(line) - len(line.lstrip())]
        if mark == BEGIN:
            inside = found = True
        elif inside and mark == RELEASED_AS:
            instead = []
        elif inside and mark == END:
            write = [f"{indent}# Your code here.", f"{indent}raise NotImplementedError"]
            stub += write if instead is None else instead
            inside, instead = False, None
        elif instead is not None:
            instead.append(line.replace("# ", "", 1))
        else:
            key.append(line)
            stub += [line] * (not inside)
    if not found or inside:
        raise SourceError(f"{where}: mark the student's part with {BEGIN} and {END}")
    return "\n".join(key), "\n".join(stub)


def _read_solution(name: str, text: str, where: str) -> Solution:
    solution = Solution(name, *key_and_stub(text, where))
    for version, source in (("the key", solution.key), ("the stub", solution.stub)):
        _parsed(source, f"{where}: {version}")
    return solution


def parse(source: str) -> ast.Module:
    """`ast.parse` by one thread at a time. Raises what that raises.

    In CPython before 3.11.8 and 3.12.2, threads that parse at the same time sometimes get a
    SystemError (https://github.com/python/cpython/issues/106905).
    """
    with _PARSING:
        return ast.parse(source)


def _parsed(source: str, where: str) -> ast.Module:
    try:
        return parse(source)
    except SyntaxError as error:
        raise SourceError(f"{where}: {error}") from None


def _read_check(name: str, cell: dict[str, Any], text: str, common: str, where: str) -> CheckSource:
    points = cell["metadata"]["nbgrader"].get("points")
    if not isinstance(points, int | float) or points <= 0:
        raise SourceError(f"{where}: needs points in its nbgrader metadata")
    return check_of(name, points, _without_magic(text, f"%%check {name}", where), common, where)


def check_of(name: str, points: float, source: str, common: str, where: str) -> CheckSource:
    """The check that the text `source` defines, with `common` before it. Raises SourceError."""
    tree = _parsed(source, where)
    concept = ast.get_docstring(tree)
    if not concept:
        raise SourceError(f"{where}: needs a docstring: the concept, in a sentence")
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function in ("draw(rng, ranks)", "on_rank(student, given)"):
        if function.partition("(")[0] not in functions:
            raise SourceError(f"{where}: define {function} in the check itself")
    settings = _read_settings(tree, where)
    if not settings.get("solutions"):
        raise SourceError(f"{where}: needs SOLUTIONS = [names of the solution cells it runs]")
    return CheckSource(name, points, common + source, " ".join(concept.split()), **settings)


def _read_settings(tree: ast.Module, where: str) -> dict[str, Any]:
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if not isinstance(target, ast.Name) or target.id not in _SETTINGS:
            continue
        try:
            value = ast.literal_eval(node.value)
        except ValueError:
            raise SourceError(f"{where}: {target.id} has to be a plain constant") from None
        if not isinstance(value, kind := _SETTINGS[target.id]):
            raise SourceError(f"{where}: {target.id} has to be a {kind.__name__}")
        found[target.id.lower()] = tuple(value) if kind is list else value
    return found


def _read_wrong_answer(cell: dict[str, Any], text: str, where: str) -> WrongAnswer:
    own = cell["metadata"]["grader"]
    for key in ("name", "solution", "loses"):
        if not isinstance(own.get(key), str):
            raise SourceError(f"{where}: a wrong answer needs {key!r} in its grader metadata")
    source = _without_magic(text, f"%%wrong_answer {own['name']}", where)
    _parsed(source, where)
    loses = tuple(own["loses"].split(", "))
    return WrongAnswer(own["name"], own["solution"], source, loses, own.get("says", ""))
