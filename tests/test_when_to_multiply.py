"""Every leaf of "When do I multiply by the world size?" was run, and says what it is."""

import re

import nbformat
import pytest

from labkit.book.passage import passage
from labkit.launch.scripts import project_root

CHAPTER = project_root() / "book" / "start" / "when_to_multiply.ipynb"
LEAVES = re.findall(
    r"^\| \[(\d+)\]\(leaf-\1\) \| .* \| (1/W|1|W|no factor)\b[^|]* \|$",
    passage(CHAPTER, "the-factors"),
    re.MULTILINE,
)


def test_the_leaves_are_numbered():
    assert [leaf for leaf, _ in LEAVES] == [str(number) for number in range(1, 12)]


@pytest.mark.parametrize(("leaf", "said"), LEAVES)
def test_each_leaf_was_run_and_the_factor_in_the_table_is_the_right_one(leaf, said):
    cells = nbformat.read(CHAPTER, as_version=4).cells
    (cell,) = (c for c in cells if f"\nrun_leaf({leaf}, " in f"\n{c.source}")
    headers, _, row = "".join(output.text for output in cell.outputs).strip().splitlines()
    assert headers.split() == ["ratio,", "×1", "ratio,", "×W", "ratio,", "×1/W", "cosine", "right"]
    *ratios, cosine, right = row.split()
    if said == "no factor":
        assert right == "none"
        assert float(cosine) < 0.999
    else:
        assert (right, cosine) == (f"×{said}", "1.0000")
        assert ratios[["×1", "×W", "×1/W"].index(right)] == "1.0000"
