"""Ratio on the left, angle to the truth on the right: one row per way to compute a gradient."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from labkit.book import figures
from labkit.testing.compare import Comparison
from labkit.testing.verdict import angle_in_degrees


def switchboard(found: Mapping[str, Comparison]) -> Figure:
    """Draw every comparison: a square where a number is wrong, a circle where it is right.

    Ratios have to lie between 0.4 and 2.5, and angles between 0 and 90 degrees.
    """
    size = (6.4, 0.8 + 0.38 * len(found))
    figure, (ratios, angles) = plt.subplots(1, 2, figsize=size, sharey=True)
    for row, comparison in enumerate(found.values()):
        angle = angle_in_degrees(comparison.cosine)
        _dot(ratios, comparison.ratio, row, right=abs(comparison.ratio - 1) < 1e-4)
        _dot(angles, angle, row, right=comparison.cosine > 1 - 1e-4)
    for axes, truth in ((ratios, 1), (angles, 0)):
        axes.axvline(truth, color=figures.TRUTH, lw=1, ls="--", zorder=0)
    ratios.set_xscale("log", base=2)
    ratios.set(xlim=(0.4, 2.5), xlabel="ratio")
    ratios.set_xticks([0.5, 1, 2], ["1/2", "1", "2"])
    ratios.set_yticks(range(len(found)), list(found), fontsize=9)
    ratios.set_ylim(len(found) - 0.5, -0.5)
    angles.set(xlim=(-4, 94), xticks=range(0, 91, 30), xlabel="angle, degrees")
    return figure


def _dot(axes: plt.Axes, x: float, row: int, *, right: bool) -> None:
    color = figures.RANKS[2] if right else figures.WRONG
    axes.plot(x, row, "o" if right else "s", color=color, ms=7)
