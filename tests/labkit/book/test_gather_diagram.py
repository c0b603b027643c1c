"""The figures on gathers show as many arrows and scores as there are ranks."""

import matplotlib.pyplot as plt
import pytest

from labkit.book.gather_diagram import gather_backward, own_rows_of_scores


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_arrow_reaches_rank_0_from_each_loss_that_has_a_gradient_for_it(world_size):
    plain, with_gradient = gather_backward(world_size).axes
    for axes, arrows, after in ((plain, 1, f"1/{world_size}"), (with_gradient, world_size, "1")):
        drawn = [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]
        assert len(drawn) == arrows
        said = [text.get_text() for text in axes.texts]
        assert f"gradient of $x_0$: {arrows}; after DDP: {after}" in said


def test_one_rank_owns_its_rows_and_a_caption_has_a_score_in_each_row():
    axes = own_rows_of_scores(rank=1, world_size=4, per_rank=2).axes[0]
    *scores, frame = axes.patches
    filled = {(s.get_x(), s.get_y()) for s in scores if s.get_facecolor()[3] < 1}
    assert filled == {(column, row) for column in range(8) for row in (2, 3)}
    assert (frame.get_x(), frame.get_width(), frame.get_height()) == (2, 1, 8)
