"""The board marks what is wrong, the ratio on the left and the angle on the right."""

import math

import matplotlib.pyplot as plt
import pytest

from labkit.book.switchboard import switchboard
from labkit.testing import Comparison


def test_a_wrong_number_is_a_square_and_a_right_one_a_circle():
    found = {
        "right": Comparison(1.0, 1.0),
        "scaled": Comparison(0.5, 1.0),
        "turned": Comparison(1.0, math.cos(math.radians(30))),
    }
    figure = switchboard(found)
    ratios, angles = (
        [line for line in axes.lines if len(line.get_xdata()) == 1] for axes in figure.axes
    )
    assert [line.get_marker() for line in ratios] == ["o", "s", "o"]
    assert [line.get_marker() for line in angles] == ["o", "o", "s"]
    assert angles[2].get_xdata()[0] == pytest.approx(30)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["right", "scaled", "turned"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["ratio", "angle, degrees"]
    plt.close(figure)
