"""The arrows end where the gradients are, and the black one at their average."""

import matplotlib.pyplot as plt
import torch

from labkit.book.arrows import gradient_arrows


def test_each_rank_has_an_arrow_and_the_last_one_is_their_average():
    of_ranks = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([-4.0, 1.0])]
    figure = gradient_arrows(of_ranks, torch.tensor([-1.0, 1.0]))
    (axes,) = figure.axes
    arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None)]
    assert [arrow.xy for arrow in arrows] == [(1, 0), (0, 2), (-4, 1), (-1, 1)]
    names = [text.get_text() for text in axes.texts if text.get_text()]
    assert names == ["rank 0", "rank 1", "rank 2"]
    circle = next(line for line in axes.lines if line.get_marker() == "o")
    assert (circle.get_xdata()[0], circle.get_ydata()[0]) == (-1.0, 1.0)
    plt.close(figure)


def test_a_zero_gradient_has_its_name_and_a_distant_full_batch_its_circle():
    figure = gradient_arrows([torch.zeros(2), torch.tensor([1.0, 0.0])], torch.tensor([5.0, -3.0]))
    (axes,) = figure.axes
    (zero,) = (text for text in axes.texts if text.get_text() == "rank 0")
    assert zero.get_position() == (0, 0)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert left < 5 < right
    assert bottom < -3 < top
    plt.close(figure)
