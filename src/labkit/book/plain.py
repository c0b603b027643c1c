"""A chapter for JupyterLab, which knows no directive of the book's and folds no cell by its tag.

Directives become bold headings, folds become `<details>` and collapsed cells, a link without a text
gets the title of its target, and a citation is its key in brackets.
"""

import re
from pathlib import Path

from nbformat import NotebookNode

_DIRECTIVE = re.compile(r"(`{3,}|:{3,})\{([\w-]+)\} ?(.*)$")
_FENCE = re.compile(r"`{3,}|:{3,}")
_LABEL = re.compile(r"\([\w-]+\)=$")
_OPTION = re.compile(r":([\w-]+): ")
_NAMELESS_LINK = re.compile(r"\[\]\(([^)#]+\.(?:ipynb|md))\)")
_HEADINGS = {
    "exercise": "Exercise: {}",
    "predict": "Write down what you predict",
    "playable": "In the built book, a figure to play with",
}
_CITATION = re.compile(r"\{cite:[pt]\}`([^`]+)`")
_SUBSTITUTION = re.compile(r"\{\{ \w+ \}\}$")  # a picture that the build inserts
_END = ["", "</details>", ""]
_HIDDEN = {
    "hide-input": {"source_hidden": True},
    "hide-output": {"outputs_hidden": True},
    "hide-cell": {"source_hidden": True, "outputs_hidden": True},
}


def make_plain(notebook: NotebookNode, folder: Path) -> None:
    """Rewrite the cells of `notebook`, whose links begin in `folder`."""
    in_solution = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text, in_solution = _plain_text(cell.source, in_solution)
            text = _NAMELESS_LINK.sub(lambda link: _named(link[1], folder), text)
            cell.source = _CITATION.sub(r"[\1]", text)
            continue
        tags = ["hide-cell"] if in_solution else cell.metadata.get("tags", [])
        for tag in tags:
            if tag in _HIDDEN:
                cell.metadata.setdefault("jupyter", {}).update(_HIDDEN[tag])


def _plain_text(text: str, in_solution: bool) -> tuple[str, bool]:
    """The text without directives, and whether a solution is open at its end."""
    out: list[str] = []
    opened: list[tuple[str, str]] = []  # fences, each with its directive
    folded = in_solution and not text.startswith("```{solution-end}")
    if folded:
        out += _fold("Solution, continued")
    for line in text.splitlines():
        marks, kind = opened[-1] if opened else ("", "")
        if marks and line == marks:
            opened.pop()
            out += {"dropdown": _END, "code": [line]}.get(kind, [])
        elif kind != "code" and (directive := _DIRECTIVE.match(line)):
            opened.append((directive[1], directive[2]))
            if directive[2] == "solution-start":
                in_solution = folded = True
            elif directive[2] == "solution-end":
                out += _END * folded
                in_solution = folded = False
            out += _opening(directive[2], directive[3])
        elif fence := _FENCE.match(line):
            opened.append((fence[0], "code"))
            out.append(line)
        elif kind == "code":
            out.append(line)
        else:
            out += _line(line, kind)
    return "\n".join(out + _END * folded), in_solution


def _opening(kind: str, title: str) -> list[str]:
    if kind == "solution-end":
        return []
    if kind in ("dropdown", "solution-start"):
        return _fold("Solution" if kind == "solution-start" else title)
    return [f"**{_HEADINGS.get(kind, '{}').format(title)}**", ""]


def _line(line: str, kind: str) -> list[str]:
    """A line in the directive `kind`, or in none."""
    if kind and (option := _OPTION.match(line)):
        return [line.strip(":"), ""] if option[1] in ("columns", "choices") else []
    if kind == "predict":
        return [f"- {line.split('|')[-1].strip()}"]
    return [] if _LABEL.match(line) or _SUBSTITUTION.match(line) else [line]


def _fold(title: str) -> list[str]:
    return [f"<details><summary>{title}</summary>", ""]


def _named(target: str, folder: Path) -> str:
    """A link to `target` with its first heading as the text."""
    heading = re.search(r'^[\s"]*# (.*?)(?:\\n",)?$', (folder / target).read_text(), re.MULTILINE)
    return f"[{heading[1] if heading else target}]({target})"
