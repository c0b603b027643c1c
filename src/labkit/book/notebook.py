"""Open a chapter or an assignment in JupyterLab, on this machine's loopback address.

    python -m labkit.book.notebook [NAME] [JUPYTERLAB'S OPTIONS…]

A reader runs and changes cells, and tests compare the stored outputs of a chapter. So JupyterLab
opens a copy, in the folder `notebooks`, which git ignores. A copy that is there is opened as it is;
delete it to start over.

JupyterLab knows no directive of the book's, and folds no cell by its tag. In the copy, directives
are bold headings, folds are `<details>` and collapsed cells, a link without a text has the title of
its target, and a citation is its key in brackets.
"""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import nbformat
from nbformat import NotebookNode

from labkit.book.chapters import find, notebooks_of
from labkit.launch.arguments import explained_by
from labkit.launch.scripts import project_root

FIRST = "book/start/what_is_averaged.ipynb"
COPIES = "notebooks"
# What a chapter links to or imports, besides other chapters.
BESIDE = (".md", ".svg", ".png", ".py")
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


def place_of_copy(path: Path) -> Path:
    """Where the copy of `path` is, which is relative to the project's root, as the result is.

    It is as deep as `path`: a chapter that reads `../../labs` finds it from its copy, too.
    """
    return Path(COPIES, *path.parts[1:])


def copy_missing(root: Path) -> None:
    """Copy notebooks, and what the book has beside them, unless `notebooks` has it already."""
    found = (path for path in (root / "book").rglob("*.*") if path.suffix in BESIDE)
    unwanted = ("conftest.py", ".solutions.py")
    beside = [path.relative_to(root) for path in found if not path.name.endswith(unwanted)]
    for path in [*notebooks_of(root), *beside]:
        target = root / place_of_copy(path)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(f"{target.name}.unfinished")
            shutil.copyfile(root / path, unfinished)
            if path.suffix == ".ipynb" and path.parts[0] == "book":
                notebook = nbformat.read(unfinished, as_version=4)
                make_plain(notebook, root / path.parent)
                nbformat.write(notebook, unfinished)
            unfinished.replace(target)  # a part of a copy would be kept as the reader's own


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


def main() -> NoReturn:
    parser = explained_by(__doc__)
    parser.add_argument("name", nargs="?", default=FIRST, help=f"default: {FIRST}")
    options = sys.argv[1:]
    if options[:1] in (["-h"], ["--help"]):
        parser.parse_args(options)
    # argparse would take the value of an option of JupyterLab's for the name.
    name = options.pop(0) if options and not options[0].startswith("-") else FIRST
    try:
        root = project_root()
        copy = place_of_copy(find(name, root))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    copy_missing(root)
    print(f"Opening {copy}, a copy that you can change. Stop with Ctrl-C, twice.", flush=True)
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", "--log-level=WARN"]
    command += [f"--ServerApp.root_dir={root / COPIES}"]
    command += [f"--LabApp.default_url=/lab/tree/{copy.relative_to(COPIES).as_posix()}"]
    if os.geteuid() == 0:  # in a container
        command += ["--allow-root"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command += ["--LabApp.news_url=None", *options]
    # The kernel of this environment, also where the user has installed another "python3".
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "JUPYTER_PREFER_ENV_PATH": "1"}
    # In place of this process, so that no signal can end one and leave the other.
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
