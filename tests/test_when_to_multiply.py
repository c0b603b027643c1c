"""Every leaf of the tree "When do I multiply by the world size?" was run, and says what it is."""

import ast
import re

import nbformat
import pytest

from labkit.launch.scripts import project_root

CHAPTER = project_root() / "book" / "start/when_to_multiply.ipynb"
NO_FACTOR = "no factor repairs it"
LEAVES = 11


def code_cells() -> list[nbformat.NotebookNode]:
    cells = nbformat.read(CHAPTER, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def drawn_leaves() -> list[str]:
    """What the figure of the tree says at each leaf, in order."""
    (cell,) = (cell for cell in code_cells() if "\nTREE = " in cell.source)
    plain = [
        statement
        for statement in ast.parse(cell.source).body
        if isinstance(statement, ast.Assign) and statement.targets[0].id in ("NO_FACTOR", "TREE")
    ]
    names = {}
    exec(compile(ast.Module(plain, type_ignores=[]), "the tree", "exec"), names)
    answers = [ends for branch in names["TREE"].values() for ends in branch.values()]
    return [verdict.replace("\n", " ") for ends in answers for _, verdict in ends]


def row_of(leaf: int) -> tuple[dict[str, float], float, str]:
    """Ratio by factor, cosine, and the factor that is right, as the leaf's cell printed them."""
    (cell,) = (c for c in code_cells() if f"\nrun_leaf({leaf}, " in f"\n{c.source}")
    assert cell.execution_count is not None
    text = "".join(output.get("text", "") for output in cell.outputs)
    headers, _, row = text.strip().splitlines()
    assert headers.split() == ["ratio,", "×1", "ratio,", "×W", "ratio,", "×1/W", "cosine", "right"]
    *numbers, right = row.split()
    *ratios, cosine = map(float, numbers)
    return dict(zip(("×1", "×W", "×1/W"), ratios, strict=True)), cosine, right


@pytest.mark.parametrize("leaf", range(1, LEAVES + 1))
def test_each_leaf_was_run_and_the_factor_in_the_tree_is_the_right_one(leaf):
    said = drawn_leaves()[leaf - 1]
    ratios, cosine, right = row_of(leaf)
    assert right == ("none" if said == NO_FACTOR else said)
    if said == NO_FACTOR:
        assert cosine < 0.999
    else:
        assert cosine == 1
        assert [factor for factor, ratio in ratios.items() if ratio == 1] == [said]


def test_the_board_shows_every_leaf_with_its_two_numbers():
    (board,) = (cell for cell in code_cells() if "\nNAMES = " in cell.source)
    text = "".join(output.get("text", "") for output in board.outputs)
    rows = [line for line in text.splitlines() if re.search(r"\d\.\d{4}  \d\.\d{4}$", line)]
    assert len(rows) == len(drawn_leaves()) == LEAVES
    for leaf, row in enumerate(rows, start=1):
        ratios, cosine, _ = row_of(leaf)
        assert [float(number) for number in row.split()[-2:]] == [ratios["×1"], cosine]
    assert any("image/png" in output.get("data", {}) for output in board.outputs)
