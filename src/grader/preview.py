"""An assignment as a page of the book: tasks and stubs, times, and what is graded; no solution.

    python -m grader preview labs/assignments/*.ipynb book/teach/assignments

The page is Markdown and not a notebook: nobody executes it, and it stores no output.
"""

import os
import re
from pathlib import Path

from grader.source import Assignment, CheckSource, SourceError, kind_of, read_assignment, source_of

_LINK = re.compile(r"\]\((\.\.?/[^)#\s]+)")
# What the notebook's first paragraph says of points and time: the page says it in a list.
_SAID_ALREADY = re.compile(
    r" ?\*\*\d+ points\.[^*]*\*\*| ?Checks that you can run count .*?hand in\.", re.S
)
_TIMES = ("reading_minutes", "doing_minutes", "teaches")


def write_preview(source: Path, folder: Path) -> Path:
    """Write the page of the assignment at `source` into `folder`; returns its path.

    Raises SourceError, also when the notebook's metadata say no times, and OSError.
    """
    page = folder / f"{source.stem}.md"
    text = preview(read_assignment(source), source, folder)
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return page


def preview(assignment: Assignment, source: Path, folder: Path) -> str:
    """The page, for a file in `folder`: links of the notebook at `source` are rewritten for it."""
    own = assignment.notebook["metadata"]["grader"]
    missing = [name for name in _TIMES if name not in own]
    if missing:
        raise SourceError(f'{source.name}: a preview needs {missing[0]!r} under "grader"')
    checks = {check.name: check for check in assignment.checks}
    heading, _, introduction = source_of(assignment.notebook["cells"][0]).partition("\n")
    visible = sum(check.points for check in assignment.checks if check.visible)
    parts = [
        f"% Made from {source.name} by `python -m grader preview`. Change that file instead.",
        heading,
        f"- **What it teaches:** {own['teaches']}\n"
        f"- **Time:** {_duration(own['reading_minutes'])} to read, "
        f"{_duration(own['doing_minutes'])} to do. "
        "These are the author's estimates; no class has been timed.\n"
        f"- **What is graded:** {assignment.points:g} points: "
        f"{visible:g} for visible checks, which you can run, and "
        f"{assignment.points - visible:g} for hidden checks on fresh inputs after you hand in.",
        _SAID_ALREADY.sub("", introduction).strip(),
    ]
    graded: list[CheckSource] = []
    for cell in assignment.notebook["cells"][1:]:
        kind = kind_of(cell)
        if cell["cell_type"] == "markdown":
            parts += _graded(graded)
            graded = []
            parts.append(source_of(cell).strip())
        elif kind == "given":
            parts += ["All tasks begin with:", _code(source_of(cell))]
        elif kind == "solution":
            name = cell["metadata"]["nbgrader"]["grade_id"]
            parts.append(_code(assignment.solutions[name].stub))
        elif kind == "check":
            graded.append(checks[cell["metadata"]["nbgrader"]["grade_id"]])
    parts += _graded(graded)
    text = "\n\n".join(parts) + "\n"
    return _LINK.sub(lambda link: f"]({_from(folder, source.parent / link[1])}", text)


def _graded(checks: list[CheckSource]) -> list[str]:
    """What is graded in one task; of a hidden check only the points."""
    if not checks:
        return []
    lines = [f"- Visible check, {_points(c.points)}: {c.concept}" for c in checks if c.visible]
    hidden = sum(check.points for check in checks if not check.visible)
    if hidden:
        lines.append(f"- Hidden checks, {_points(hidden)}.")
    return ["Graded:\n\n" + "\n".join(lines)]


def _code(source: str) -> str:
    # A directive: formatters of code leave it as the students' notebook has it.
    return f"```{{code-block}} python\n{source.strip()}\n```"


def _points(number: float) -> str:
    return f"{number:g} point{'' if number == 1 else 's'}"


def _duration(minutes: int) -> str:
    if minutes < 60:
        return f"{minutes} minutes"
    return f"{minutes / 60:g} hour{'' if minutes == 60 else 's'}"


def _from(folder: Path, target: Path) -> str:
    """`target` as a link from a page in `folder`."""
    return Path(os.path.relpath(target.resolve(), folder.resolve())).as_posix()
