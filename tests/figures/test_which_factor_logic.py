"""The questions of "Which factor is right?" lead where the chapter's tree leads."""

import random
import re
from collections import Counter

import nbformat
import pytest
from figures.node import call
from figures.one_step import Step, gradients_of_step

from labkit.launch.scripts import project_root
from labkit.testing.compare import ratio_and_cosine
from when_to_multiply import TREE

CHAPTER = project_root() / "book" / "start/when_to_multiply.ipynb"
CASES = 600
VALUES = {
    "combine": ["average", "sum", ""],
    "summed": ["all", "own", ""],
    "sees": ["own", "all", ""],
    "divide": ["own", "all", "none", ""],
    "counts": ["equal", "unequal", ""],
    "computes": ["whole", "rows", ""],
    "whole": ["gradient", "plain", ""],
    "rows": ["all", "own", "plain", ""],
}
# Where each answer leads in the tree that the chapter draws: part of the branch's text.
ROOTS = {
    ("sum", None): "SUMMED",
    ("average", "own"): "own samples only",
    ("average", "all"): "samples of all ranks",
}
TEXTS = {
    "summed": {"all": "global count", "own": "divide by own count"},
    "divide": {"own": "own count", "all": "global count", "none": "do not divide"},
    "computes": {"whole": "WHOLE", "rows": "OWN ROWS"},
    "counts": {"equal": "equal counts", "unequal": "unequal counts"},
    "whole": {"gradient": "carries gradient", "plain": "plain gather"},
    "rows": {
        "all": "divide by global count",
        "own": "divide by own count",
        "plain": "plain gather",
    },
}


def code_cells() -> list[nbformat.NotebookNode]:
    cells = nbformat.read(CHAPTER, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def plain(text: str) -> str:
    return text.replace("\n", " ")


def tree() -> dict[str, dict[str, list[tuple[str, str]]]]:
    """The chapter's TREE, with spaces for line breaks."""
    return {
        plain(root): {
            plain(second): [(plain(third), plain(verdict)) for third, verdict in ends]
            for second, ends in answers.items()
        }
        for root, answers in TREE.items()
    }


def starting_with(words: str, texts: list[str]) -> list[str]:
    """The texts that contain `words`, or only the one that begins with them."""
    found = [text for text in texts if words in text]
    return [text for text in found if text.startswith(words)] or found


def leaves_of_the_chapter(answers: dict[str, str]) -> list[int]:
    """The leaves that the chapter's tree leaves open, in order."""
    number, kept = 0, []
    choices = tree()
    combine, sees = answers["combine"], answers["sees"]
    for root, seconds in choices.items():
        key = "summed" if "SUMMED" in root else "divide" if "own samples" in root else "computes"
        wanted_root = ROOTS.get((combine, None if combine == "sum" else sees))
        root_open = (
            wanted_root in root
            if wanted_root
            else combine == "" or (combine == "average" and "AVERAGED" in root)
        )
        given = answers[key] if wanted_root else ""
        matching = starting_with(TEXTS[key][given], list(seconds)) if given else list(seconds)
        for second, ends in seconds.items():
            third_key = {"divide": "counts", "computes": "whole" if "WHOLE" in second else "rows"}
            third = answers[third_key[key]] if given and len(ends) > 1 else ""
            texts = [text for text, _ in ends]
            open_ends = starting_with(TEXTS[third_key[key]][third], texts) if third else texts
            for text, _ in ends:
                number += 1
                if root_open and second in matching and text in open_ends:
                    kept.append(number)
    return kept


def verdicts() -> list[str]:
    return [v for seconds in tree().values() for ends in seconds.values() for _, v in ends]


def random_answers(generator: random.Random) -> dict[str, str]:
    return {key: generator.choice(values) for key, values in VALUES.items()}


def test_answers_leave_the_same_leaves_open_as_in_the_tree_of_the_chapter():
    generator = random.Random(5)
    cases = [random_answers(generator) for _ in range(CASES)]
    seen = Counter()
    for answers, found in zip(
        cases, call("which_factor", "walk", [(case,) for case in cases]), strict=True
    ):
        wanted = leaves_of_the_chapter(answers)
        assert sorted(found["possible"]) == wanted, answers
        assert found["leaf"] == (wanted[0] if len(wanted) == 1 else None), answers
        seen[found["leaf"]] += 1
    assert set(seen) == {None, *range(1, 12)}


def test_each_leaf_has_the_factor_and_the_numbers_of_the_chapter():
    leaves = call("which_factor", "leaf", [(number,) for number in range(1, 12)])
    factors = [
        {"none": "no factor repairs it"}.get(leaf["factor"], f"×{leaf['factor']}")
        for leaf in leaves
    ]
    assert factors == verdicts()
    (board,) = (cell for cell in code_cells() if "\nNAMES = " in cell.source)
    text = "".join(output.get("text", "") for output in board.outputs)
    printed = re.findall(r"^leaf \d+ .* (\d\.\d{4})  (\d\.\d{4})$", text, re.MULTILINE)
    assert [[float(number) for number in row] for row in printed] == [
        leaf["measured"] for leaf in leaves
    ]


def test_every_leaf_has_a_place_on_the_page_to_which_the_figure_links():
    text = "\n".join(cell.source for cell in nbformat.read(CHAPTER, as_version=4).cells)
    for leaf in range(1, 12):
        assert (
            f"(leaf-{leaf})=\n**Leaf {leaf}:" in text or f"(leaf-{leaf})=\n\n**Leaf {leaf}:" in text
        )


# Leaves whose loss sees a rank's own samples, as steps of the model with two weights.
OWN = {
    1: {"divide": "own"},
    2: {"divide": "own"},
    3: {"divide": "all"},
    4: {"divide": "none"},
    10: {"combine": "sum", "divide": "all"},
    11: {"combine": "sum", "divide": "own"},
}


@pytest.mark.parametrize("leaf", OWN)
def test_the_factor_makes_a_gradient_equal_to_the_full_batchs_and_no_other_factor_does(leaf):
    generator = random.Random(leaf)
    cases = []
    for _ in range(100):
        w = generator.randint(2, 6)
        counts = [generator.randint(1, 5) for _ in range(w)]
        if leaf in (1, 11):
            counts = counts[:1] * w
        if leaf == 2:
            counts[0] = counts[1] + 1
        cases.append(
            [
                tuple(tuple(round(generator.uniform(-4, 6), 3) for _ in "xy") for _ in range(count))
                for count in counts
            ]
        )
    multipliers = call("which_factor", "multiplier", [(leaf, len(case)) for case in cases])
    for samples, multiplier in zip(cases, multipliers, strict=True):
        w = len(samples)
        for factor in (1.0, float(w), 1 / w):
            outcome = gradients_of_step(Step(tuple(samples), factor=factor, **OWN[leaf]))
            ratio, cosine = ratio_and_cosine([outcome.final[0]], [outcome.truth])
            right = abs(ratio - 1) < 1e-9 and cosine > 1 - 1e-9
            assert right == (factor == multiplier), (samples, factor)
