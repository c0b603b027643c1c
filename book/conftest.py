"""Keeps what nbval executes: the book rendered after the tests is the one tested.

nbval runs every chapter and compares its text with the stored one. Here the outputs
of that very run, figures included, are written to `_build/executed`, from which
`make html` renders without running anything again.
"""

from pathlib import Path

import pytest

from labkit.book.chapters import EXECUTED, copy_pages, normalize, write_chapter
from labkit.launch import kernels

# Other tests draw thousands of ports, and could take one that a chapter's kernel was
# promised.
kernels.pytest_configure()

BOOK = Path(__file__).parent
COPY = BOOK.parent / EXECUTED


def pytest_sessionstart(session: pytest.Session) -> None:
    """Copy the pages once, in the process that hands the tests out to workers."""
    if not hasattr(session.config, "workerinput"):
        copy_pages(BOOK, COPY)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a chapter's last cell, write the chapter with what it has just put out."""
    outputs = getattr(item, "test_outputs", None)
    if outputs is None:
        return
    item.cell.outputs = outputs
    item.cell.execution_count = item.cell_num + 1
    if nextitem is None or nextitem.parent is not item.parent:
        write_chapter(normalize(item.parent.nb), COPY / item.path.relative_to(BOOK))
