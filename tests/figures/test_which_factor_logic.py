"""The leaves of "Which factor is right?" are those of the chapter."""

import re

import nbformat
from figures.node import call

from labkit.launch.scripts import project_root

CHAPTER = project_root() / "book" / "start" / "when_to_multiply.ipynb"
CELLS = nbformat.read(CHAPTER, as_version=4).cells
LEAVES = range(1, 12)


def printed_for(leaf: int) -> list[str]:
    """The line below the headers: a ratio for each factor, the cosine, and the right factor."""
    (cell,) = (c for c in CELLS if f"\nrun_leaf({leaf}, " in f"\n{c.source}")
    return "".join(output.text for output in cell.outputs).splitlines()[2].split()


def test_each_leaf_has_the_factor_and_the_numbers_of_the_chapter():
    for number, leaf in zip(
        LEAVES, call("which_factor", "leaf", [(n,) for n in LEAVES]), strict=True
    ):
        ratio, _, _, cosine, right = printed_for(number)
        assert leaf["measured"] == [float(ratio), float(cosine)], f"leaf {number}"
        assert {"none": "none"}.get(leaf["factor"], f"×{leaf['factor']}") == right, f"leaf {number}"


def test_every_leaf_has_a_place_on_the_page_to_which_the_figure_links():
    text = "\n".join(cell.source for cell in CELLS)
    assert [n for n in LEAVES if not re.search(rf"\(leaf-{n}\)=\n+\*\*Leaf {n}:", text)] == []
