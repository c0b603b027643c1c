"""Every leaf of the tree "When do I multiply by the world size?" was run, and says what it is."""

import ast
import re

import nbformat
import pytest

from labkit.launch.scripts import project_root

CHAPTER = project_root() / "book" / "start/when_to_multiply.ipynb"
NO_FACTOR = "no factor repairs it"


def code_cells() -> list[nbformat.NotebookNode]:
    cells = nbformat.read(CHAPTER, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def drawn_leaves() -> list[str]:
    """What the figure of the tree says at each leaf, in order."""
    (tree,) = (cell for cell in code_cells() if cell.source.startswith("LEAVES = "))
    return ast.literal_eval(ast.parse(tree.source).body[0].value)


def table_of(leaf: int) -> dict[str, list[str]]:
    """Factor → ratio, cosine and verdict, as the leaf's cell printed them."""
    (cell,) = (c for c in code_cells() if f"\ntry_factors({leaf}, " in f"\n{c.source}")
    assert cell.execution_count is not None
    lines = "".join(output.get("text", "") for output in cell.outputs).splitlines()
    return {words[0]: words[1:] for words in map(str.split, lines) if words[:1] and "×" in words[0]}


@pytest.mark.parametrize("leaf", range(1, 10))
def test_each_leaf_was_run_and_the_factor_in_the_tree_is_the_right_one(leaf):
    said, found = drawn_leaves()[leaf - 1], table_of(leaf)
    assert set(found) == {"×1", "×W", "×1/W"}
    right = [factor for factor, figures in found.items() if figures[-1] == "right"]
    assert right == ([] if said == NO_FACTOR else [said])
    for ratio, cosine, *_ in found.values():
        assert (float(cosine) < 0.999) == (said == NO_FACTOR), (ratio, cosine)


def test_the_switchboard_shows_every_leaf_with_its_two_figures():
    (board,) = (cell for cell in code_cells() if cell.source.startswith("NAMES = "))
    text = "".join(output.get("text", "") for output in board.outputs)
    rows = [line for line in text.splitlines() if re.search(r"\d\.\d{4}  \d\.\d{4}$", line)]
    assert len(rows) == len(drawn_leaves()) == 9
    for leaf, row in enumerate(rows, start=1):
        assert row.split()[-2:] == table_of(leaf)["×1"][:2]
    assert any("image/png" in output.get("data", {}) for output in board.outputs)
