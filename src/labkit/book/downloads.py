"""The notebooks that readers download from the built book: each says what it needs.

    python -m labkit.book.downloads _build/_config.yml _build/html

A downloaded chapter is opened anywhere, and its first cell imports packages that come with the
project. This adds a first cell to the downloads, not to the chapters, that says so where they are
missing.
"""

import argparse
import sys
from pathlib import Path

import nbformat
import yaml

from labkit.book.chapters import write_chapter
from labkit.book.repository import clone_command
from labkit.launch.scripts import project_root

CELL_ID = "needs-the-project"

GUARD = """\
# Added to the download: this notebook needs packages that come with the book's code.
import importlib.util

missing = [name for name in {needed!r} if importlib.util.find_spec(name) is None]
if missing:
    raise ModuleNotFoundError(
        f"This Python has no {{' and no '.join(missing)}}. "
        "{where} run: make notebook CHAPTER={chapter}"
    )
"""
NEEDED = ("labkit", "miniddp")


def guard(chapter: str, address: str) -> str:
    """The source of the first cell: raises ModuleNotFoundError outside of the project's kernel,
    and in a folder without the module that the chapter imports.
    """
    module = (project_root() / chapter).with_suffix(".py")
    needed = (*NEEDED, module.stem) if module.exists() else NEEDED
    where = "In the folder that this book came in,"
    if address:
        where = f"Run: {clone_command(address)}. There,"
    return GUARD.format(needed=needed, where=where, chapter=chapter)


def add_guards(site: Path, address: str) -> list[Path]:
    """Add the cell to every notebook that `site` offers for download; return their paths.

    Idempotent. Raises FileNotFoundError if there is no notebook.
    """
    sources = site / "_sources"
    downloads = sorted(sources.rglob("*.ipynb"))
    if not downloads:
        raise FileNotFoundError(f"there is no notebook below {sources}; make html builds them")
    for path in downloads:
        notebook = nbformat.read(path, as_version=4)
        chapter = Path("book") / path.relative_to(sources)
        cell = nbformat.v4.new_code_cell(guard(chapter.as_posix(), address), id=CELL_ID)
        notebook.cells = [cell, *(c for c in notebook.cells if c.get("id") != CELL_ID)]
        notebook.nbformat_minor = max(notebook.nbformat_minor, 5)  # the first with cell ids
        write_chapter(notebook, path)
    return downloads


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="the configuration, for the project's address")
    parser.add_argument("site", type=Path)
    arguments = parser.parse_args()
    try:
        config = yaml.safe_load(arguments.config.read_text())
        add_guards(arguments.site, config["repository"]["url"])
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
