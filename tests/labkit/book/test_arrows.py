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
