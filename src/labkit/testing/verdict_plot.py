"""The picture of a chapter's wrong variants: how far each is off in ratio and in angle.

Apart from `labkit.testing.verdict`, which ranks import: matplotlib costs each of them a second.
"""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from labkit.book import figures
from labkit.testing.verdict import Verdict, angle_in_degrees


def verdict_figure(sections: Mapping[str, Sequence[Verdict]]) -> Figure:
    """The wrong variants of a chapter, one per line: the ratio, and the angle to the truth.

    `sections` maps a heading to each group of verdicts. Right verdicts are left out, because all
    of them would lie on the two lines of the truth. A variant has one dot per rank if the ranks
    differ. A ratio that is zero or not finite is drawn at the edge. The angle is arccos of the
    cosine.
    """
    lines: list[tuple[str, list[Verdict]]] = []
    headings: list[int] = []
    for heading, judged in sections.items():
        wrong = [v for v in judged if v.kind != "right"]
        if wrong:
            headings.append(len(lines))
            lines.append((heading, []))
        for name in dict.fromkeys(v.variant for v in wrong):
            lines.append((name, [v for v in wrong if v.variant == name]))

    figure, (ratio, angle) = plt.subplots(1, 2, figsize=(5.8, 0.7 + 0.24 * len(lines)), sharey=True)
    largest = 90.0
    for row, (_, judged) in enumerate(lines):
        for verdict in judged:
            ratio.plot(ratio_within_axis(verdict.comparison.ratio), row, "o", color=figures.WRONG)
            if math.isfinite(verdict.comparison.cosine):
                degrees = angle_in_degrees(verdict.comparison.cosine)
                largest = max(largest, degrees)
                angle.plot(degrees, row, "o", color=figures.WRONG)
    ratio.set(xscale="log", xlim=(0.035, 28), xlabel="ratio")
    ratio.set_xticks([0.1, 0.25, 1, 4, 10], ["0.1", "¼", "1", "4", "10"])
    ratio.minorticks_off()
    angle.set(xlim=(-4, largest + 4), xticks=range(0, math.ceil(largest) + 1, 30))
    angle.set_xlabel("angle, degrees")
    for axes, at in ((ratio, 1), (angle, 0)):
        axes.axvline(at, color=figures.TRUTH, lw=0.8, alpha=0.5)
        axes.tick_params(axis="x", labelsize=9)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", alpha=0.2)
        axes.spines["left"].set_visible(False)
    ratio.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=9)
    for row in headings:
        ratio.get_yticklabels()[row].set_fontweight("bold")
    ratio.set_ylim(len(lines) - 0.5, -0.5)
    return figure


def ratio_within_axis(ratio: float) -> float:
    """`ratio`, moved to the edge of an axis from 1/20 to 20 if it is zero or not finite."""
    return 20.0 if math.isnan(ratio) else min(max(ratio, 0.05), 20.0)
