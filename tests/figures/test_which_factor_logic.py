"""The leaves of "Which factor is right?" are those of the chapter's tree."""

import re

import nbformat
from figures.node import call

from labkit.launch.scripts import project_root
from when_to_multiply import TREE

CHAPTER = project_root() / "book" / "start" / "when_to_multiply.ipynb"
CELLS = nbformat.read(CHAPTER, as_version=4).cells
LEAVES = range(1, 12)


def test_each_leaf_has_the_factor_and_the_numbers_of_the_chapter():
    leaves = call("which_factor", "leaf", [(number,) for number in LEAVES])
    factors = [
        {"none": "no factor repairs it"}.get(leaf["factor"], f"×{leaf['factor']}")
        for leaf in leaves
    ]
    ends = [end for branch in TREE.values() for several in branch.values() for end in several]
    assert factors == [verdict.replace("\n", " ") for _, verdict in ends]
    (board,) = (c for c in CELLS if c.cell_type == "code" and "\nNAMES = " in c.source)
    text = "".join(output.get("text", "") for output in board.outputs)
    printed = re.findall(r"^leaf \d+ .* (\d\.\d{4})  (\d\.\d{4})$", text, re.MULTILINE)
    assert [[float(number) for number in row] for row in printed] == [
        leaf["measured"] for leaf in leaves
    ]


def test_every_leaf_has_a_place_on_the_page_to_which_the_figure_links():
    text = "\n".join(cell.source for cell in CELLS)
    assert [n for n in LEAVES if not re.search(rf"\(leaf-{n}\)=\n+\*\*Leaf {n}:", text)] == []
