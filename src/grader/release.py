"""Release an assignment: try it first, then write the students' notebook and their package.

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
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grader.answer_key import SHOWN_SEED, AnswerKey
from grader.grade import grade_together
from grader.inside.values import pack
from grader.merge import Submission
from grader.report import sentence_of
from grader.sandbox import OF_LABKIT, OUR_SOURCES
from grader.source import Assignment, CheckSource, kind_of, source_of

INSTRUCTIONS = "START_HERE.md"
_CHAPTER = re.compile(r"\[([^\]]*)\]\(\.\./\.\./book/([\w/]+)\.ipynb\)")
# The source folds the cells that only its author reads: JupyterLab by one, the book by the other.
_FOLDED = ("jupyter", "tags")


@dataclass(frozen=True)
class Finding:
    """One trial: what was graded, what it earned and should earn, and what a student reads."""

    name: str
    found: str
    expected: str
    reads: list[str]


def lint(answer_key: AnswerKey) -> Iterator[Finding]:
    """Grade the key, the stubs, and the wrong answers; yield the findings.

    Raises AuthorError, SandboxError.
    """
    assignment = answer_key.assignment
    keys = assignment.keys()
    trials = [("the key", keys), ("the stubs", assignment.stubs())]
    trials += [(w.name, keys | {w.solution: w.source}) for w in assignment.wrong_answers]
    loses = {wrong.name: wrong.loses for wrong in assignment.wrong_answers}
    submissions = [(name, Submission(solutions)) for name, solutions in trials]
    for result in grade_together(submissions, answer_key, teachers=True):
        if result.student == "the stubs":
            yield Finding("the stubs", f"{result.score:g} points", "0 points", [])
            continue
        lost = [check for check in result.checks if check.score < check.points or check.needs_human]
        reads = [f"{check.name}: {check.needs_human or sentence_of(check)}" for check in lost]
        found = [check.name + " (not judged)" * bool(check.needs_human) for check in lost]
        named = loses.get(result.student, ())
        expected = [check.name for check in result.checks if check.name in named]
        said = (f"loses {', '.join(names) or 'nothing'}" for names in (found, expected))
        yield Finding(result.student, *said, reads)


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


def record_visible(answer_key: AnswerKey) -> list[dict[str, Any]]:
    """Each visible check, with the inputs of SHOWN_SEED and what the key returns for them.

    The key is executed in the hidden checks, too, on inputs that the lint has not drawn. Raises
    AuthorError.
    """
    recorded = []
    with AnswerKey(answer_key.assignment, SHOWN_SEED, answer_key.trust) as shown:
        for check in answer_key.assignment.checks:
            key = shown.key_results(check)
            if check.visible:
                record = base64.b64encode(pack({"inputs": shown.inputs(check), "key": key}))
                recorded.append({"check": asdict(check), "record": record.decode()})
    return recorded


def write_release(answer_key: AnswerKey, path: Path, book: str = "") -> None:
    """Write the students' notebook to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    notebook = release(answer_key.assignment, record_visible(answer_key), book)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _line(assignment: Assignment, check: CheckSource) -> str:
    if check.visible:
        name = f'"{assignment.name}", "{check.name}"'
        return f"from grader.student import check\n\ncheck({name})"
    return f"# {check.worth}: checked with fresh inputs after you hand in."


def write_student_package(
    out: Path, notebooks: Sequence[Path], assignments: Sequence[Assignment]
) -> None:
    """Write `out`, a folder or a file *.zip, with all that students need of released `notebooks`.

    That is the notebooks, instructions, and the code of the visible checks; no solution: neither
    miniddp, nor the museum, nor a source notebook. A folder may exist; files of the same names are
    replaced.
    """
    files = "\n".join(
        f"- `{notebook.name}`: {assignment.title}, {assignment.points:g} points"
        for notebook, assignment in zip(notebooks, assignments, strict=True)
    )
    torch = version("torch").partition("+")[0]  # without the name of its build
    page = Path(__file__).with_name("start_here.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="grader-package-") as name:
        folder = Path(name) / out.stem
        for path in ("grader", *OF_LABKIT):
            _copy(path, folder)
        for notebook in notebooks:
            shutil.copyfile(notebook, folder / notebook.name)
        text = page.format(files=files, first=notebooks[0].name, torch=torch)
        (folder / INSTRUCTIONS).write_text(text, encoding="utf-8")
        if out.suffix == ".zip":
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(shutil.make_archive(str(folder), "zip", name, folder.name), out)
        else:
            shutil.copytree(folder, out, dirs_exist_ok=True)


def _copy(path: str, folder: Path) -> None:
    source = OUR_SOURCES / path
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, folder / path, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, folder / path)
