"""The figures of the pages about nodes show what their texts say."""

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch

from labkit.book.figures import WRONG
from labkit.book.hierarchical_figure import draw_flat_and_hierarchical
from labkit.book.restart_figure import draw_restart_stores


def test_two_links_cross_in_the_flat_ring_and_four_in_the_hierarchical_all_reduce():
    figure = draw_flat_and_hierarchical()
    for axes, crossing, inside in zip(figure.axes, (2, 4), (6, 6), strict=True):
        arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
        colors = [plt.matplotlib.colors.to_hex(arrow.get_edgecolor()) for arrow in arrows]
        assert colors.count(WRONG.lower()) == crossing
        assert len(arrows) == crossing + inside
        ranks = {text.get_text() for text in axes.texts if text.get_text().isdigit()}
        assert ranks == set("01234567")
    plt.close(figure)


def test_the_two_agents_count_differently_in_both_panels():
    figure = draw_restart_stores()
    for axes in figure.axes:
        said = "\n".join(text.get_text() for text in axes.texts)
        assert said.count("restarts counted: 0") == said.count("restarts counted: 1") == 1
    plt.close(figure)
