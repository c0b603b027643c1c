"""Figures that are drawn from data: the data are right, and what is drawn says so."""

import matplotlib.pyplot as plt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.book.batch_grid import draw_batch_grid, token_weights
from labkit.book.cluster_figure import draw_ring_on_nodes
from labkit.book.launch_order_figure import draw_launch_order, launch_moments
from labkit.book.step_diagrams import no_sync_timeline


@given(filled=st.integers(1, 8).flatmap(lambda n: st.permutations(range(n))))
def test_buckets_are_launched_in_order_and_never_before_they_are_full(filled):
    moments = launch_moments(filled)
    assert moments == sorted(moments)
    assert all(moments[bucket] >= moment for moment, bucket in enumerate(filled))
    assert moments[-1] == len(filled) - 1


def test_a_bucket_that_is_full_twice_is_refused():
    with pytest.raises(ValueError, match="each of 2 buckets becomes full once"):
        launch_moments([0, 0])


def test_the_launch_order_is_drawn_with_every_bucket_twice_per_rank():
    figure = draw_launch_order({"rank 0": [0, 1, 2], "rank 1": [1, 0, 2]})
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(texts) == sorted(["0", "1", "2"] * 4)
    plt.close(figure)


def test_a_token_weighs_one_under_n_over_w_and_says_what_it_weighs_otherwise():
    counts = [[1, 9], [12, 2]]
    assert token_weights(counts, [[12, 12], [12, 12]]) == [[1, 1], [1, 1]]
    assert token_weights(counts, [[2, 18], [24, 4]])[0] == [6, pytest.approx(2 / 3)]
    figure = draw_batch_grid(counts, {"wrong": [[2, 18], [24, 4]], "right": [[12, 12], [12, 12]]})
    wrong, right = ([text.get_text() for text in axes.texts] for axes in figure.axes)
    assert wrong[:2] == ["1 token ÷ 2", "weight 6.00, not 1"]
    assert right[:2] == ["1 token ÷ 12", "weight 1.00"]
    plt.close(figure)


def test_a_ring_in_rank_order_crosses_twice_between_two_nodes():
    for node_of, crossing in ((lambda rank: rank // 4, 2), (lambda rank: rank % 2, 8)):
        figure = draw_ring_on_nodes(2, 4, node_of)
        arrows = [patch for patch in figure.axes[0].patches if hasattr(patch, "get_arrowstyle")]
        assert len(arrows) == 8
        assert sum(arrow.get_linewidth() > 2 for arrow in arrows) == crossing
        plt.close(figure)


def test_one_way_or_one_placement_is_one_panel():
    for figure in (
        draw_batch_grid([[1, 3]], {"the only way": [[2, 2]]}),
        no_sync_timeline({"the only placement": [(True, False, True)]}),
    ):
        assert len(figure.axes) == 1
        plt.close(figure)
