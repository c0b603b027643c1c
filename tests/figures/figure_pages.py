"""Figures to play with on a page of their own, without the book around them; it needs no server.

    python -m tests.figures.figure_pages           write _build/figures/index.html: all of them
    python -m tests.figures.figure_pages stills    draw each one's still picture into the book

A still is drawn by Chromium, in each state in which a page starts the figure, in the light colors,
640 px wide.
"""

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import nbformat

from labkit.book.playable import FOLDER, opening, scripts, still
from labkit.launch.scripts import project_root

WIDTH = 640
DIRECTIVE = r"^```\{playable\} (\w+)\n(?::try: .*\n)?(?::state: (\S+))?"
_PAGE = """\
<!DOCTYPE html>
<html lang="en" data-content_root="../html/">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Figures to play with</title>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = "CHOSEN" || (dark ? "dark" : "light");
</script>
<link rel="stylesheet" href="FOLDER/figure.css">
<style>
body { max-width: 54rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
button { font: inherit; }
html[data-theme="dark"] body { background: #14181e; color: #e6e8ea; }
</style>
SCRIPTS
</head>
<body>
<main>
<h1>Figures to play with</h1>
<button type="button" id="theme">Light or dark</button>
FIGURES
</main>
<script>
document.getElementById("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  dataset.theme = dataset.theme === "dark" ? "light" : "dark";
});
</script>
</body>
</html>
"""


def names(book: Path) -> list[str]:
    """The figures of the book, by name: every drawing script that has a logic script."""
    folder = book / FOLDER / "logic"
    return sorted(p.stem for p in folder.glob("*.js") if (book / FOLDER / p.name).is_file())


def page(book: Path, out: Path, figures: Sequence[str], theme: str = "", state: str = "") -> str:
    """A page with `figures` in `state`; their addresses are relative to the folder `out`.

    It starts in the theme "light" or "dark", or in the one that the reader's browser prefers.
    """
    folder = quote(Path(os.path.relpath(book / FOLDER, out)).as_posix())
    loaded = dict.fromkeys(script for name in figures for script in scripts(name))
    parts = {
        "CHOSEN": theme,
        "SCRIPTS": "\n".join(f'<script defer src="FOLDER/{one}"></script>' for one in loaded),
        "FIGURES": "\n".join(f"{opening(name, state)}\n</figure>" for name in figures),
        "FOLDER": folder,
    }
    text = _PAGE
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def starts(book: Path) -> list[tuple[str, str]]:
    """The figures on the pages of `book`: name, and the state that the page gives it, or ""."""
    pages = [nbformat.read(path, 4).cells for path in book.rglob("*.ipynb")]
    texts = [path.read_text() for path in book.rglob("*.md")]
    texts += [cell.source for cells in pages for cell in cells]
    found = re.findall(DIRECTIVE, "\n".join(texts), re.MULTILINE)
    return sorted({(name, "") for name in names(book)} | set(found))


def draw_stills(book: Path) -> None:
    """Write each figure's still pictures into `_static/figures/still` of `book`."""
    from playwright.sync_api import sync_playwright

    from tests.browser import start_chromium

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


def write_page(project: Path) -> None:
    """Write the page of all figures."""
    book, out = project / "book", project / "_build" / "figures"
    out.mkdir(parents=True, exist_ok=True)
    path = out / "index.html"
    path.write_text(page(book, out, names(book)))
    print(f"The figures: {path.as_uri()}")


if __name__ == "__main__":
    if sys.argv[1:] == ["stills"]:
        draw_stills(project_root() / "book")
    else:
        write_page(project_root())
