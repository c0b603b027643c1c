"""Draw each figure's still picture into the book, with Chromium: `make figures-stills`.

A figure is drawn as it starts, in the light colors, 640 px wide.
"""

import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from labkit.book.playable import FOLDER, still
from labkit.book.playable_page import names, page
from labkit.launch.scripts import project_root
from tests.browser import start_chromium

WIDTH = 640


def draw_stills(book: Path) -> None:
    """Write `_static/figures/still/NAME.svg` for every figure of `book`."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        window = start_chromium(playwright).new_page(viewport={"width": 1280, "height": 900})
        for name in names(book):
            path = Path(scratch) / "still.html"
            text = page(book, Path(scratch), [name], theme="light")
            path.write_text(text.replace("54rem", f"{WIDTH + 34}px; box-sizing: content-box"))
            window.goto(path.as_uri())
            window.wait_for_selector("figure.is-live")
            target = book / FOLDER / still(name)
            target.write_text(window.evaluate("name => Figures.still(name)", name) + "\n")
            print(f"  {target.relative_to(book)}  {target.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    draw_stills(project_root() / "book")
