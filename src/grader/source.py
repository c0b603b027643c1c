"""The one source notebook of an assignment: what is given, asked, checked, and known as wrong.

A cell says what it is in its metadata, under "grader": {"kind": …}:

    given          code that every solution may use; locked; executed before any solution
    solution       the key, with the part that the student writes between the marks
                   ### BEGIN SOLUTION and ### END SOLUTION
    common         code that every check may use: put before each of them; never on a student's page
    check          a check: points, and four functions (see `grader.check`)
    wrong answer   a known wrong solution, and the one check that it has to lose

A cell without a kind is text. Solutions and checks carry nbgrader's metadata besides (schema 3).
book/teach/teach.md describes the format for authors.
"""

import ast
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

SCHEMA = 3
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
RELEASED_AS = "### RELEASED AS"
KINDS = ("given", "solution", "common", "check", "wrong answer")
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_SETTINGS = {"SOLUTIONS": list, "VISIBLE": bool, "LINK": str, "HOLD": bool, "SECONDS": int}
_SETTINGS |= {"TOLERANCE": float, "TORCH_DDP": bool, "MUSEUM": list}


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
    solutions: tuple[str, ...]  # SOLUTIONS: the solution cells that are executed for it
    visible: bool = False  # VISIBLE: released, and its first difference is shown
    link: str = "routed"  # LINK: "routed" through the grader, or "gloo"
    hold: bool = False  # HOLD: answer collectives only when backward has passed its last gate
    seconds: int = 3  # SECONDS of processor time that each rank may use; 10 times that by the clock
    torch_ddp: bool = False  # TORCH_DDP: a solution may use torch's DistributedDataParallel
    museum: tuple[
        str, ...
    ] = ()  # MUSEUM: exhibits of labkit's museum that implementations() may use
    tolerance: float = 1e-5  # TOLERANCE: largest difference, relative to the largest value
    record: str = ""  # in a release: inputs and answers, see `grader.record`

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`, after a journey through JSON."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()})


@dataclass(frozen=True)
class WrongAnswer:
    """A solution cell that is wrong in a known way, and the checks that it loses, no others."""

    name: str
    solution: str
    source: str
    loses: tuple[str, ...]


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


def read_assignment(path: str | Path) -> Assignment:
    """Read and check a source notebook. Raises SourceError, OSError."""
    path = Path(path)
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise SourceError(f"{path} is not a notebook: not JSON") from None
    if notebook.get("nbformat") != 4 or not isinstance(notebook.get("cells"), list):
        raise SourceError(f"{path} is not a notebook of format 4")
    givens: list[str] = []
    common = ""
    solutions: dict[str, Solution] = {}
    checks: list[CheckSource] = []
    wrong: list[WrongAnswer] = []
    for number, cell in enumerate(notebook["cells"]):
        where = f"{path.name}, cell {number}"
        kind = kind_of(cell)
        if kind is None:
            continue
        text = source_of(cell)
        if kind == "given":
            givens.append(without_magic(text))
        elif kind == "solution":
            solution = _read_solution(cell, text, where)
            if solution.name in solutions:
                raise SourceError(f"{where}: a second solution called {solution.name!r}")
            solutions[solution.name] = solution
        elif kind == "common":
            common += without_magic(text) + "\n\n"
        elif kind == "check":
            check = _read_check(cell, text, common, where)
            if check.name in [other.name for other in checks]:
                raise SourceError(f"{where}: a second check called {check.name!r}")
            checks.append(check)
        else:
            wrong.append(_read_wrong_answer(cell, text, where))
    own = notebook.get("metadata", {}).get("grader", {})
    assignment = Assignment(
        own.get("assignment", path.stem),
        own.get("title", path.stem),
        notebook,
        tuple(givens),
        solutions,
        tuple(checks),
        tuple(wrong),
    )
    _look_at_references(assignment, path)
    return assignment


def kind_of(cell: dict[str, Any]) -> str | None:
    """The kind that the cell's metadata names. Raises SourceError for an unknown one."""
    kind = cell.get("metadata", {}).get("grader", {}).get("kind")
    if kind is not None and kind not in KINDS:
        raise SourceError(f"a cell of kind {kind!r}; there are {', '.join(KINDS)}")
    return kind


def source_of(cell: dict[str, Any]) -> str:
    """The text of a cell, which a file may hold as one string or as lines."""
    source = cell.get("source", "")
    return "".join(source) if isinstance(source, list) else source


def without_magic(text: str) -> str:
    """Without the first line if it is a cell magic, which only a notebook understands."""
    first, _, rest = text.partition("\n")
    return "\n" + rest if first.startswith("%%") else text


def make_stub(key: str, where: str = "a solution") -> str:
    """`key` with every marked part replaced by a NotImplementedError, indented as it was.

    Or by what stands, commented out, between ### RELEASED AS and ### END SOLUTION: code to fix.
    """
    lines, inside, instead, found = [], False, None, False
    for line in key.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip() == BEGIN:
            inside = found = True
        elif inside and line.strip() == RELEASED_AS:
            instead = []
        elif inside and line.strip() == END:
            if instead is None:
                instead = [f"{indent}# Your code here.", f"{indent}raise NotImplementedError"]
            lines += instead
            inside, instead = False, None
        elif instead is not None:
            lines.append(line.replace("# ", "", 1))
        elif not inside:
            lines.append(line)
    if not found or inside:
        raise SourceError(f"{where}: mark the student's part with {BEGIN} and {END}")
    return "\n".join(lines)


def make_key(text: str) -> str:
    """The solution without its marks, and without what is released in its place."""
    lines, released = [], False
    for line in text.splitlines():
        if line.strip() == RELEASED_AS:
            released = True
        elif line.strip() == END:
            released = False
        elif not released and line.strip() != BEGIN:
            lines.append(line)
    return "\n".join(lines)


def _read_solution(cell: dict[str, Any], text: str, where: str) -> Solution:
    name = _name(cell, where)
    solution = Solution(name, make_key(text), make_stub(text, where))
    for version, source in (("the key", solution.key), ("the stub", solution.stub)):
        try:
            ast.parse(source)
        except SyntaxError as error:
            raise SourceError(f"{where}: {version} of {name!r}: {error}") from None
    return solution


def _name(cell: dict[str, Any], where: str) -> str:
    nbgrader = cell.get("metadata", {}).get("nbgrader", {})
    name = nbgrader.get("grade_id")
    if nbgrader.get("schema_version") != SCHEMA or not isinstance(name, str):
        raise SourceError(f"{where}: needs nbgrader's metadata, schema {SCHEMA}, with a grade_id")
    if not _NAME.match(name):
        raise SourceError(f"{where}: grade_id {name!r}; use small letters, digits and _")
    return name


def _read_check(cell: dict[str, Any], text: str, common: str, where: str) -> CheckSource:
    name = _name(cell, where)
    points = cell["metadata"]["nbgrader"].get("points")
    if not isinstance(points, int | float) or points <= 0:
        raise SourceError(f"{where}: check {name!r} needs points in its nbgrader metadata")
    source = without_magic(text)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise SourceError(f"{where}: check {name!r}: {error}") from None
    concept = ast.get_docstring(tree)
    if not concept:
        raise SourceError(f"{where}: check {name!r} needs a docstring: the concept, in a sentence")
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    missing = {"draw", "on_rank"} - functions
    if missing:
        raise SourceError(f"{where}: check {name!r} has no function {sorted(missing)[0]}")
    if not functions & {"expected", "judge"}:
        raise SourceError(f"{where}: check {name!r} needs expected, judge, or both")
    settings = _read_settings(tree, f"{where}: check {name!r}")
    return CheckSource(
        name,
        points,
        common + source,
        " ".join(concept.split()),
        tuple(settings.pop("SOLUTIONS", ())),
        museum=tuple(settings.pop("MUSEUM", ())),
        **{key.lower(): value for key, value in settings.items()},
    )


def _read_settings(tree: ast.Module, where: str) -> dict[str, Any]:
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name = node.targets[0].id
        if name in _SETTINGS:
            try:
                found[name] = ast.literal_eval(node.value)
            except ValueError:
                raise SourceError(f"{where}: {name} has to be a plain constant") from None
            if not isinstance(found[name], _SETTINGS[name]):
                raise SourceError(f"{where}: {name} has to be a {_SETTINGS[name].__name__}")
    if not found.get("SOLUTIONS"):
        raise SourceError(f"{where}: needs SOLUTIONS = [names of the solution cells it runs]")
    return found


def _read_wrong_answer(cell: dict[str, Any], text: str, where: str) -> WrongAnswer:
    own = cell["metadata"]["grader"]
    try:
        loses = tuple(own["loses"].split(", "))
        return WrongAnswer(own["name"], own["solution"], without_magic(text), loses)
    except KeyError as error:
        raise SourceError(f"{where}: a wrong answer needs {error} in its metadata") from None


def _look_at_references(assignment: Assignment, path: Path) -> None:
    checks = {check.name for check in assignment.checks}
    if not checks or not assignment.solutions:
        raise SourceError(f"{path} has no check, or no solution: is it a source notebook?")
    for check in assignment.checks:
        for name in check.solutions:
            if name not in assignment.solutions:
                raise SourceError(f"check {check.name!r} runs {name!r}, which is no solution")
    for wrong in assignment.wrong_answers:
        for name in wrong.loses:
            if name not in checks:
                raise SourceError(f"wrong answer {wrong.name!r} loses {name!r}: no such check")
        if wrong.solution not in assignment.solutions:
            raise SourceError(f"wrong answer {wrong.name!r} replaces {wrong.solution!r}: not there")
