"""The tree draws each leaf once, numbered in order, in the color of its verdict."""

import matplotlib.pyplot as plt
from matplotlib.colors import to_hex

from labkit.book import figures
from labkit.book.decision_tree import decision_tree

TREE = {
    "first?": {"a": [("", "fine")], "b": [("x", "fine"), ("y", "broken")]},
    "second?": {"c": [("", "fine")]},
}


def test_leaves_are_numbered_from_the_top_and_unknown_verdicts_are_drawn_as_wrong():
    figure = decision_tree(TREE, {"fine": "#009E73"})
    leaves = [t for t in figure.axes[0].texts if t.get_text().startswith("leaf")]
    expected = ["leaf 1\nfine", "leaf 2\nfine", "leaf 3\nbroken", "leaf 4\nfine"]
    assert [leaf.get_text() for leaf in leaves] == expected
    assert [leaf.get_position()[1] for leaf in leaves] == [0, 1, 2, 3]
    colors = [to_hex(leaf.get_color()).upper() for leaf in leaves]
    assert colors == ["#009E73", "#009E73", figures.WRONG, "#009E73"]
    plt.close(figure)


def test_every_question_and_answer_is_drawn_and_an_empty_one_is_not():
    figure = decision_tree(TREE, {})
    texts = {t.get_text() for t in figure.axes[0].texts}
    assert {"first?", "second?", "a", "b", "c", "x", "y"} <= texts
    assert "" not in texts
    plt.close(figure)
