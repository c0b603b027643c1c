"""The page with all figures, and its figures one by one, in a browser (tests/browser.py)."""

from collections.abc import Callable
from pathlib import Path

import pytest
from browser import OpenedPage, OpenPage, chromium, open_page
from playwright.sync_api import Locator

from labkit.book.playable_page import write_page
from labkit.launch.scripts import project_root

__all__ = ["chromium", "open_page"]

OpenFigure = Callable[..., tuple[OpenedPage, Locator]]


@pytest.fixture(scope="session")
def all_figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make figures` writes."""
    return write_page(project_root() / "book", tmp_path_factory.mktemp("figures"))


@pytest.fixture
def open_figure(open_page: OpenPage, all_figures: Path) -> OpenFigure:
    """`open_figure(name, state="w=4", …)` → the page and the figure; … as `open_page` takes it."""

    def open_one(name: str, state: str = "", **how: object) -> tuple[OpenedPage, Locator]:
        opened = open_page(all_figures, fragment=f"{name}:{state}", **how)
        return opened, opened.page.locator(f"#playable-{name}")

    return open_one
