"""An assignment as a page of the book: tasks and stubs, times, and what is graded; no solution.

    python -m grader preview labs/assignments/*.ipynb book/teach/assignments

The page is Markdown and not a notebook: nobody executes it, and it stores no output.
"""

import os
import re
from pathlib import Path

from grader.source import Assignment, SourceError, kind_of, read_assignment, source_of

_LINK = re.compile(r"\]\((\.\.?/[^)#\s]+)")
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
    first, *cells = assignment.notebook["cells"]
    heading, _, introduction = source_of(first).partition("\n")
    parts = [
        f"% Made from {source.name} by `python -m grader preview`. Change that file instead.",
        heading,
        f"- **What it teaches:** {own['teaches']}\n"
        f"- **Time:** {_duration(own['reading_minutes'])} to read, "
        f"{_duration(own['doing_minutes'])} to do. "
        "These are the author's estimates; no class has been timed.",
        introduction.strip(),
    ]
    for cell in cells:
        kind, name = kind_of(cell), cell.get("id")
        if cell["cell_type"] == "markdown":
            parts.append(source_of(cell).strip())
        elif kind == "given":
            parts.append(_code(source_of(cell)))
        elif kind == "solution":
            parts.append(_code(assignment.solutions[name].stub))
        elif kind == "check":
            one = checks[name]
            shown = f"Visible check, {one.worth}: {one.concept}"
            parts.append(f"- {shown if one.visible else f'Hidden check, {one.worth}.'}")
    text = "\n\n".join(parts) + "\n"
    return _LINK.sub(lambda to: f"]({os.path.relpath(source.parent / to[1], folder)}", text)


def _code(source: str) -> str:
    # A directive: formatters of code leave it as the students' notebook has it.
    return f"```{{code-block}} python\n{source.strip()}\n```"


def _duration(minutes: int) -> str:
    if minutes < 60:
        return f"{minutes} minutes"
    return f"{minutes / 60:g} hour{'' if minutes == 60 else 's'}"
