"""Draw each figure's still picture into the book, with Chromium: `make figures-stills`.

A figure is drawn in each state in which a page starts it, in the light colors, 640 px wide.
"""

import re
import tempfile
from pathlib import Path

import nbformat
from playwright.sync_api import sync_playwright

from labkit.book.playable import FOLDER, still
from labkit.launch.scripts import project_root
from tests.browser import start_chromium
from tests.figures.figure_pages import names, page

WIDTH = 640
DIRECTIVE = r"^```\{playable\} (\w+)\n(?::try: .*\n)?(?::state: (\S+))?"


def starts(book: Path) -> list[tuple[str, str]]:
    """The figures on the pages of `book`: name, and the state that the page gives it, or ""."""
    pages = [nbformat.read(path, 4).cells for path in book.rglob("*.ipynb")]
    texts = [path.read_text() for path in book.rglob("*.md")]
    texts += [cell.source for cells in pages for cell in cells]
    found = re.findall(DIRECTIVE, "\n".join(texts), re.MULTILINE)
    return sorted({(name, "") for name in names(book)} | set(found))


def draw_stills(book: Path) -> None:
    """Write each figure's still pictures into `_static/figures/still` of `book`."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        window = start_chromium(playwright).new_page(viewport={"width": 1280, "height": 900})
        for name, state in starts(book):
            path = Path(scratch) / "still.html"
            text = page(book, Path(scratch), [name], theme="light", state=state)
            path.write_text(text.replace("54rem", f"{WIDTH + 34}px; box-sizing: content-box"))
            window.goto(path.as_uri())
            window.wait_for_selector("figure.is-live")
            target = book / FOLDER / still(name, state)
            target.write_text(window.evaluate("name => Figures.still(name)", name) + "\n")
            print(f"  {target.relative_to(book)}  {target.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    draw_stills(project_root() / "book")
