"""How long a page takes, by one rule, and the pages that say so.

    python -m labkit.book.minutes      write the minutes into every page that states them

`python -m labkit.book.chapters update` writes them into the chapters that it has run. What is
folded, hidden, or written by a survey takes no time. An exercise takes the time of its text, and a
fixed time for its kind: a starter tagged `repair` runs, and few of its lines are wrong.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat

from labkit.launch.scripts import project_root

# Seconds. 200 words per minute is a usual speed for technical text.
WORD, CODE_LINE, TABLE_ROW, FIGURE = 0.3, 4.0, 2.0, 20.0
PREDICTION, PROGRAM, QUESTION = 120.0, 600.0, 300.0

_STATED = re.compile(r"\d+ minutes to read(, \d+ for the exercises)?(?= · )")
# Rows of the front page: a path, and a part of the route that has a limit.
_PATH = re.compile(r"^(\| [^|]+ \| )\d+( \| .* → .* \|)$", re.MULTILINE)
ROUTE_TIMES = re.compile(r"^\| (\d+)–(\d+) (?=\| \[\])", re.MULTILINE)
_ROUTE = re.compile(rf"{ROUTE_TIMES.pattern}(\| \[\]\((\S+)\) \| (.*) \|)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)]+)\)")
_HIDDEN_CODE = {"hide-input", "remove-input", "hide-cell", "remove-cell"}
_HIDDEN_OUTPUT = {"hide-output", "remove-output", "hide-cell", "remove-cell"}
# Rows to look something up in, between these comments of a page.
_WRITTEN = re.compile(r"^% The next lines are written by .*?^% Until here.*?$", re.M | re.S)
_UNREAD = re.compile(r"\{(dropdown|predict)\}")
_FENCE = re.compile(r"^(`{3,}|:{3,})\s*(.*)$")


class Piece(NamedTuple):
    """A part of a page: its section's heading and label, the seconds that it takes, its words."""

    heading: str
    label: str
    of_exercises: bool
    seconds: float
    words: int


def pieces(page: Path) -> list[Piece]:
    """What a reader of `page` (a notebook or Markdown) reads and does, in order."""
    if page.suffix == ".md":
        read = _WRITTEN.sub("", page.read_text())
        cells: list[Any] = [nbformat.v4.new_markdown_cell(read)]
    else:
        cells = nbformat.read(page, as_version=4).cells
    reader = _Reader()
    return [piece for cell in cells for piece in reader.read(cell)]


def minutes(page: Path) -> tuple[int, int]:
    """Whole minutes to read `page`, and for its exercises."""
    found = pieces(page)
    to_read = sum(piece.seconds for piece in found if not piece.of_exercises)
    to_do = sum(piece.seconds for piece in found if piece.of_exercises)
    return math.ceil(to_read / 60), math.ceil(to_do / 60)


def with_minutes(text: str, page: Path) -> str:
    """`text`, the contents of `page`, with its minutes and those of its tables of paths."""
    if _STATED.search(text):
        to_read, to_do = minutes(page)
        said = f"{to_read} minutes to read" + f", {to_do} for the exercises" * (to_do > 0)
        text = _STATED.sub(said, text, count=1)
    if page.stem == "index":
        text = _PATH.sub(lambda row: f"{row[1]}{_of_path(row[2], page.parent)}{row[2]}", text)
        ends = itertools.accumulate(
            (_of_part(page.parent / row[4], row[5]) for row in _ROUTE.finditer(text)),
            initial=0,
        )
        times = itertools.pairwise(math.ceil(end / 60) for end in ends)
        text = _ROUTE.sub(lambda row: "| {}–{} {}".format(*next(times), row[3]), text)
    return text


def write(pages: Iterable[Path]) -> None:
    """Write the minutes into every one of `pages` that states them."""
    for page in pages:
        before = page.read_text()
        if (after := with_minutes(before, page)) != before:
            page.write_text(after)


def pages_of(book: Path) -> list[Path]:
    """Every page of `book`; README.md is for those who write them."""
    found = [*book.rglob("[!R]*.md"), *book.rglob("*.ipynb")]
    return sorted(page for page in found if ".ipynb_checkpoints" not in page.parts)


def _of_path(row: str, book: Path) -> int:
    """Minutes to read the chapters and sections that the row of a path links to.

    A page without stated minutes is one to look things up in, and takes none.
    """
    total = 0
    for target in _LINK.findall(row):
        if target.endswith(".ipynb"):
            total += minutes(book / target)[0]
        elif not target.endswith(".md"):
            total += _of_label(target, book)
    return total


def _of_label(label: str, book: Path) -> int:
    for page in pages_of(book):
        if f"({label})=" in page.read_text():
            in_it = (p.seconds for p in pieces(page) if p.label == label and not p.of_exercises)
            return math.ceil(sum(in_it) / 60)
    raise ValueError(f"the front page links to {label}, and no page has a section of this label")


def _of_part(page: Path, what: str) -> float:
    """Seconds for `page` up to the last heading of "stop before *Heading*" with the exercises so
    far, "without *Heading*", and for what follows: "predict", "a bug" (a line to repair), and
    "Then", a program to write or repair.
    """
    found = pieces(page)
    headings = [piece.heading for piece in found]
    *_, until = re.findall(r"stop before \*(.+?)\*", what)
    left_out = re.findall(r"without \*(.+?)\*", what)
    before = found[: headings.index(until)]
    read = sum(piece.seconds for piece in before if piece.heading not in left_out)
    kinds = {"predict": PREDICTION, "a bug": QUESTION, "Then ": PROGRAM}
    return read + sum(time for kind, time in kinds.items() if kind in what)


class _Reader:
    """Goes through a page and knows in which section, exercise, or fold it is."""

    def __init__(self) -> None:
        self.heading, self.label, self.next_label = "", "", ""
        self.exercise, self.solution = False, False

    def read(self, cell: Any) -> Iterator[Piece]:
        if cell.cell_type == "markdown":
            yield from self._text(cell.source)
        elif not self.solution and self.exercise:
            tags = cell.metadata.get("tags", [])
            if "starter" in tags and "repair" not in tags:
                yield self._piece(PROGRAM - QUESTION)
        elif not self.solution:
            yield self._piece(_seconds_of_code(cell))

    def _piece(self, seconds: float, words: int = 0) -> Piece:
        in_all = seconds + WORD * words
        return Piece(self.heading, self.label, self.exercise, in_all, words)

    def _text(self, text: str) -> Iterator[Piece]:
        fences: list[tuple[str, str]] = []  # what is open: its marks, and its directive
        for line in text.splitlines():
            if fence := _FENCE.match(line):
                marks, directive = fence.groups()
                if directive:
                    yield from self._opens(directive)
                    fences.append((marks, directive))
                elif fences and marks == fences[-1][0]:
                    fences.pop()
                else:
                    fences.append((marks, "code"))
            elif line.startswith(":class:") and "dropdown" in line and fences:
                fences[-1] = fences[-1][0], "{dropdown}"
            elif not self.solution and not any(_UNREAD.match(kind) for _, kind in fences):
                yield self._line(line, bool(fences) and "{" not in fences[-1][1])

    def _opens(self, directive: str) -> Iterator[Piece]:
        if directive.startswith("{exercise}"):
            self.exercise = True
            yield self._piece(PREDICTION if "Predict" in directive else QUESTION)
        elif directive.startswith("{solution-start}"):
            self.solution = True
        elif directive.startswith("{solution-end}"):
            self.exercise = self.solution = False
        elif directive.startswith("{playable}"):
            yield self._piece(FIGURE)

    def _line(self, line: str, is_code: bool) -> Piece:
        if heading := re.match(r"#+ (.*)", line):
            self.heading, self.label, self.next_label = heading[1], self.next_label, ""
        if is_code or line.startswith("    "):
            return self._piece(CODE_LINE * bool(line.strip()))
        if line.startswith("|"):
            return self._piece(TABLE_ROW, len(re.findall(r"\w[^\s|]*", line)))
        if label := re.match(r"\(([\w-]+)\)=$", line):
            self.next_label = label[1]
        if label or re.match(r":[\w-]+:", line):
            return self._piece(0)
        return self._piece(0, len(line.split()))


def _seconds_of_code(cell: Any) -> float:
    """The time for a cell's visible code, printed lines, and figures."""
    tags, seconds = set(cell.metadata.get("tags", [])), 0.0
    if not tags & _HIDDEN_CODE:
        seconds += CODE_LINE * _lines(cell.source)
    for output in cell.outputs if not tags & _HIDDEN_OUTPUT else ():
        data = output.get("data", {})
        code = "".join(re.findall(r"```python\n(.*?)```", data.get("text/markdown", ""), re.DOTALL))
        shown = output.get("text", "") or data.get("text/markdown", "")
        seconds += CODE_LINE * _lines(code) + TABLE_ROW * (0 if code else _lines(shown))
        seconds += FIGURE * ("image/png" in data)
    return seconds


def _lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


if __name__ == "__main__":
    write(pages_of(project_root() / "book"))
