"""The grid of samples: repeated samples are marked, missing ones leave a gray cell."""

from collections import Counter

import matplotlib.pyplot as plt
from matplotlib.colors import to_hex

from labkit.book import figures
from labkit.book.sample_grid import sample_grid


def colors_of(axes: plt.Axes) -> Counter[str]:
    return Counter(to_hex(patch.get_facecolor()) for patch in axes.patches)


def test_a_padded_sample_is_marked_once_and_an_uneven_tail_is_gray():
    figure = sample_grid({"padded": [[0, 2], [1, 0]], "uneven": [[0, 2], [1]], "alone": [[3]]})
    padded, uneven, alone, unused = figure.axes
    orange = figures.RANKS[1].lower()
    assert colors_of(padded) == {"#ffffff": 3, orange: 1}
    assert colors_of(uneven) == {"#ffffff": 3, "#dddddd": 1}
    assert colors_of(alone) == {"#ffffff": 1}
    assert not unused.patches
    assert sorted(text.get_text() for text in padded.texts) == ["0", "0", "1", "2"]
    plt.close(figure)


def test_of_two_equal_samples_in_one_step_the_higher_rank_is_marked():
    (axes, _) = (figure := sample_grid({"it": [[7], [7]]})).axes
    marked = [p for p in axes.patches if to_hex(p.get_facecolor()) == figures.RANKS[1].lower()]
    assert [patch.get_y() for patch in marked] == [1]
    plt.close(figure)
