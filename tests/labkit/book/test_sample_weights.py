"""The weight bars say what a gradient says."""

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.book.sample_weights import sample_weights, weight_bars

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(COUNTS)
def test_dividing_by_n_over_w_gives_every_sample_the_same_weight(counts):
    n, world_size = sum(counts), len(counts)
    weights = sample_weights(counts, [n / world_size] * world_size)
    assert weights == pytest.approx([1 / n] * n)


@given(COUNTS, st.data())
def test_the_weights_are_the_derivatives_of_the_mean_of_the_ranks_losses(counts, data):
    divisor = st.floats(0.5, 10)
    divisors = [data.draw(divisor) for _ in counts]
    losses = torch.randn(sum(counts), dtype=torch.float64, requires_grad=True)
    of_ranks = [own.sum() / by for own, by in zip(losses.split(counts), divisors, strict=True)]
    torch.stack(of_ranks).mean().backward()
    assert sample_weights(counts, divisors) == pytest.approx(losses.grad.tolist())


def test_the_figure_has_a_bar_per_sample_and_a_fraction_per_rank():
    figure = weight_bars([1, 1, 1, 5], {"own count": [1, 1, 1, 5], "N / W": [2, 2, 2, 2]})
    for axes, expected in zip(figure.axes, (["1/4"] * 3 + ["1/20"], ["1/8"] * 4), strict=True):
        assert len(axes.patches) == 8
        assert [text.get_text() for text in axes.texts] == expected
    plt.close(figure)


def test_a_rank_without_samples_has_no_bar_and_no_fraction():
    figure = weight_bars([2, 0], {"own count": [2, 1]})
    (axes,) = figure.axes
    assert len(axes.patches) == 2
    assert [text.get_text() for text in axes.texts] == ["1/4"]
    plt.close(figure)
