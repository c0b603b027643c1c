"""Each leaf of "When do I multiply by the world size?" was run; table and figure say the same."""

import re

import nbformat
import pytest
from figures.node import call

from labkit.book.repeated import passage
from labkit.launch.scripts import project_root

CHAPTER = project_root() / "book" / "start" / "when_to_multiply.ipynb"
CELLS = nbformat.read(CHAPTER, as_version=4).cells
FACTORS = dict(
    re.findall(
        r"^\| \[(\d+)\]\(leaf-\1\) \| .* \| (1/W|1|W|no factor)\b[^|]* \|$",
        passage(CHAPTER, "the-factors"),
        re.MULTILINE,
    )
)
LEAVES = range(1, 12)


def printed_for(leaf: int) -> list[str]:
    """The ratio for each factor, the cosine, and the right factor."""
    (cell,) = (c for c in CELLS if f"\nrun_case({leaf}, " in f"\n{c.source}")
    headers, _, row = "".join(output.text for output in cell.outputs).strip().splitlines()
    assert headers.split() == ["ratio,", "×1", "ratio,", "×W", "ratio,", "×1/W", "cosine", "right"]
    return row.split()


def test_the_leaves_are_numbered():
    assert list(FACTORS) == [str(number) for number in LEAVES]


@pytest.mark.parametrize("leaf", LEAVES)
def test_each_leaf_was_run_and_the_factor_in_the_table_is_the_right_one(leaf):
    *ratios, cosine, right = printed_for(leaf)
    if (said := FACTORS[str(leaf)]) == "no factor":
        assert right == "none"
        assert float(cosine) < 0.999
    else:
        assert (right, cosine) == (f"×{said}", "1.0000")
        assert ratios[["×1", "×W", "×1/W"].index(right)] == "1.0000"


def test_the_figure_has_the_factor_and_the_numbers_of_the_chapter():
    shown = call("which_factor", "leaf", [(leaf,) for leaf in LEAVES])
    for number, leaf in zip(LEAVES, shown, strict=True):
        ratio, _, _, cosine, right = printed_for(number)
        assert leaf["measured"] == [float(ratio), float(cosine)], f"leaf {number}"
        assert {"none": "none"}.get(leaf["factor"], f"×{leaf['factor']}") == right, f"leaf {number}"
