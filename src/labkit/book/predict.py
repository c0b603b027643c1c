"""The directive `predict`: the reader answers an exercise on the page, then sees what was printed.

    ```{predict} sol-averaged-predict
    :columns: ratio, cosine
    rank 0
    ```

The argument is the label of the exercise's solution. Each line of the body is a row. It begins with
a text that the solution prints, and the numbers (or yes, no) after that text are the answers: so
the page expects what its own cells have printed. After `|` a row may have the text to show instead.

    :columns: ratio, cosine        one answer per column; without it, one answer per row
    :values: 1, 3                  which of the numbers after the row's text; otherwise the first
    :choices: 1, below 1, other    what to choose from; otherwise the reader writes a number

A choice is a word or a number that is printed, or `below 1`, `above 1`, or `other`. What is shown
instead may stand before it: `yes: below 0.95, no: other`.

Without JavaScript, and in JupyterLab, there is no form. This module is a Sphinx extension.
"""

import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import nbformat
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from labkit.book.playable import FOLDER

_VALUES = r"-?\d+(?:\.\d+)?(?:e-?\d+)?|yes|no|inf|nan"


class PredictDirective(SphinxDirective):
    """Put a form here; see the module."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Callable[[str], Any]]] = {
        "columns": directives.unchanged,
        "values": directives.unchanged,
        "choices": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        page = Path(self.env.doc2path(self.env.docname))
        try:
            rows = answers(page, self.arguments[0], list(self.content), self.options)
        except ValueError as error:
            raise self.error(str(error)) from None
        columns = _parts(self.options.get("columns", ""))
        choices = [shown for shown, _ in _choices(self.options)]
        form = _form(self.arguments[0], columns, choices, rows)
        return [nodes.raw("", form, format="html")]


def answers(
    page: Path, solution: str, rows: Sequence[str], options: dict[str, str]
) -> list[tuple[str, list[str]]]:
    """Per row: the text to show, and the right answers as the reader would give them.

    Raises ValueError if the solution prints no such text, or nothing that is one of the choices.
    """
    printed, choices = _printed(page, solution), _choices(options)
    number = len(_parts(options.get("columns", ""))) or 1
    places = [int(n) for n in _parts(options.get("values", ""))] or range(1, number + 1)
    found = []
    for row in rows:
        label, _, shown = (part.strip() for part in row.partition("|"))
        values = _values_after(label, printed, [meant for _, meant in choices])
        if len(values) < max(places):
            raise ValueError(f"{solution} prints {values} after {label!r}: too few")
        answered = [_choice(values[place - 1], choices) for place in places]
        found.append((shown or label, answered))
    return found


def _printed(page: Path, solution: str) -> str:
    texts, inside = [], False
    for cell in nbformat.read(page, as_version=4).cells:
        if cell.cell_type == "markdown":
            begins = f":label: {solution}\n" in cell.source
            inside = begins or (inside and "{solution-end}" not in cell.source)
        elif inside:
            texts += [output.get("text", "") for output in cell.outputs]
    return "\n".join(texts)


def _values_after(label: str, printed: str, meant: Sequence[str]) -> list[str]:
    """The numbers, yes, no, and choices in the line of `label`, after it."""
    words = r"\s+".join(map(re.escape, label.split())) + r"(?![\w.])" * bool(label)
    values = "|".join([*map(re.escape, meant), _VALUES])
    for before in (r"^\s*", r"(?:^|.*\s)"):
        if line := re.search(rf"{before}{words}(.*)", printed, re.MULTILINE):
            return re.findall(rf"(?<![\w.×/])(?:{values})(?![\w/]|\.\d)", line[1])
    return []


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _choices(options: dict[str, str]) -> list[tuple[str, str]]:
    """What is shown, and what it means."""
    pairs = (part.rpartition(":") for part in _parts(options.get("choices", "")))
    return [(shown.strip() or meant.strip(), meant.strip()) for shown, _, meant in pairs]


def _choice(value: str, choices: Sequence[tuple[str, str]]) -> str:
    """The choice that `value` is, or `value` if there are none."""
    if not choices:
        return value
    for shown, meant in choices:
        if _is(value, meant):
            return shown
    raise ValueError(f"{value} is none of {', '.join(meant for _, meant in choices)}")


def _is(value: str, meant: str) -> bool:
    word, _, limit = meant.rpartition(" ")
    if word == "below":
        return float(value) < float(limit)
    if word == "above":
        return float(value) > float(limit)
    return meant == "other" or _same(value, meant)


def _same(value: str, other: str) -> bool:
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other


def _form(
    solution: str, columns: Sequence[str], choices: Sequence[str], rows: Sequence[Any]
) -> str:
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in columns)
    parts = [f'<form class="predict" data-solution="{html.escape(solution)}" hidden>', "<table>"]
    if columns:
        parts.append(f"<thead><tr><td></td>{head}</tr></thead>")
    for shown, right in rows:
        cells = [
            _cell(f"{shown}, {column}" if column else shown, choices, answer)
            for column, answer in zip(columns or [""], right, strict=True)
        ]
        parts.append(f'<tr><th scope="row">{html.escape(shown)}</th>{"".join(cells)}</tr>')
    parts.append("</table>")
    parts.append('<p><button type="submit">Check my prediction</button>')
    parts.append('<span role="status"></span></p>\n</form>\n')
    return "\n".join(parts)


def _cell(name: str, choices: Sequence[str], answer: str) -> str:
    named = f'aria-label="{html.escape(name)}" data-answer="{html.escape(answer)}"'
    if "cosine" in name:
        named += " data-cosine"
    if choices:
        options = "".join(f"<option>{html.escape(choice)}</option>" for choice in ("", *choices))
        field = f"<select {named}>{options}</select>"
    else:
        field = f'<input {named} inputmode="decimal" autocomplete="off" size="6">'
    return f'<td>{field}<span class="verdict"></span></td>'


def _load_script(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.Node
) -> None:
    """Add the script and the style to pages with a form only."""
    if '<form class="predict"' in context.get("body", ""):
        folder = FOLDER.relative_to("_static").as_posix()
        app.add_js_file(f"{folder}/predict.js", loading_method="defer")
        app.add_css_file(f"{folder}/predict.css")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("predict", PredictDirective)
    app.connect("html-page-context", _load_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
