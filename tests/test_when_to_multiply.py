"""Every leaf of the tree "When do I multiply by the world size?" was run, and says what it is."""

import nbformat
import pytest

from labkit.launch.scripts import project_root
from when_to_multiply import NO_FACTOR, TREE

CHAPTER = project_root() / "book" / "start" / "when_to_multiply.ipynb"
LEAVES = [verdict for branch in TREE.values() for ends in branch.values() for _, verdict in ends]


@pytest.mark.parametrize(("leaf", "said"), list(enumerate(LEAVES, start=1)))
def test_each_leaf_was_run_and_the_factor_in_the_tree_is_the_right_one(leaf, said):
    cells = nbformat.read(CHAPTER, as_version=4).cells
    (cell,) = (c for c in cells if f"\nrun_leaf({leaf}, " in f"\n{c.source}")
    headers, _, row = "".join(output.text for output in cell.outputs).strip().splitlines()
    assert headers.split() == ["ratio,", "×1", "ratio,", "×W", "ratio,", "×1/W", "cosine", "right"]
    *ratios, cosine, right = row.split()
    if said == NO_FACTOR:
        assert right == "none"
        assert float(cosine) < 0.999
    else:
        assert (right, cosine) == (said, "1.0000")
        assert ratios[["×1", "×W", "×1/W"].index(said)] == "1.0000"
