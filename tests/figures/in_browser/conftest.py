"""One figure on a page of its own, opened from its file in a real browser."""

from collections.abc import Callable
from pathlib import Path

import pytest
from browser import OpenedPage, OpenPage, chromium, open_page, visit
from figures.figure_pages import page

from labkit.launch.scripts import project_root

__all__ = ["chromium", "open_page", "visit"]

OpenFigure = Callable[..., OpenedPage]


@pytest.fixture
def open_figure(tmp_path: Path, open_page: OpenPage, visit: OpenPage) -> OpenFigure:
    """`open_figure(name, state="", width=1280, theme="light")`; `state` is as in the address.

    A figure takes the place of one that was opened before; with `beside=True`, both stay.
    """

    def open_one(
        name: str,
        state: str = "",
        theme: str = "light",
        *,
        beside: bool = False,
        **options: object,
    ) -> OpenedPage:
        path = tmp_path / f"{name}-{theme}.html"
        path.write_text(page(project_root() / "book", tmp_path, [name], theme))
        fragment = f"{name}:{state}" if state else ""
        open_it = open_page if beside else visit
        opened = open_it(path, fragment=fragment, theme=theme, **options)
        opened.page.wait_for_selector(f'figure.is-live[data-figure="{name}"]')
        return opened

    return open_one


@pytest.fixture
def cut_off() -> Callable[[OpenedPage], list[str]]:
    """The texts of the drawing that lie outside it, in part or as a whole."""
    return lambda opened: opened.page.evaluate(_CUT_OFF)


_CUT_OFF = """() => {
    const drawing = document.querySelector(".figure-drawing").getBoundingClientRect();
    return [...document.querySelectorAll(".figure-drawing text")].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.left < drawing.left - 1 || box.right > drawing.right + 1
            || box.top < drawing.top - 1 || box.bottom > drawing.bottom + 1;
    }).map((one) => one.textContent);
}"""
