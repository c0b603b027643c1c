"""For over_which_group.ipynb: a line and a table of what was measured, and the figure.

held = run_ranks(on_a_mesh, 4, "tensor")  # every way of labkit.scenarios.meshes
print(verdict("tensor", held))
"""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from IPython.display import Markdown
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from labkit.book.figures import RANKS, TRUTH, use
from labkit.scenarios.meshes import Judged, judge

REPORTS = "https://github.com/"


def verdict(mesh: str, held: Sequence) -> str:
    """How the rule's gradients compare with those of one process, in one line."""
    (rule,) = judge([{"the rule": of_rank["the rule"]} for of_rank in held])
    ratio, cosine = rule.of_worst
    agree = "all copies agree" if rule.copies_agree else "copies differ"
    return (
        f"{mesh}: {rule.comparison}; "
        f"the worst parameter's ratio {ratio:.4f}, cosine {cosine:.4f}; {agree}"
    )


def wrong_ways(
    judged: Mapping[str, Sequence[Judged]], seen: Mapping[str, str]
) -> Markdown:
    """One row per way but the rule; `seen` maps ways to what is printed beside them."""
    lines = [
        "| mesh | wrong way | ratio | cosine | worst parameter | copies | seen in |",
        "|---|---|--:|--:|---|---|---|",
    ]
    for mesh, ways in judged.items():
        for way, (ratio, cosine), worst, of_worst, agree in ways[1:]:
            worst_one = f"`{worst}`: {_number(of_worst[0])}, {_number(of_worst[1])}"
            copies = "agree" if agree else "**differ**"
            numbers = f"{_number(ratio)} | {_number(cosine)} | {worst_one} | {copies}"
            lines.append(f"| {mesh} | {way} | {numbers} | {seen.get(way, '')} |")
    return Markdown("\n".join(lines))


def _number(x: float) -> str:
    return "–" if math.isnan(x) else f"{x:z.2f}"


_TOKENS = {
    "tensor": ["sequence 0", "sequence 0", "sequence 1", "sequence 1"],
    "context": ["0, first half", "0, second half", "1, first half", "1, second half"],
    "expert": ["0, first half", "0, second half", "1, first half", "1, second half"],
}
_COPIES = {
    "tensor": ("norm", "up, first half", "up, second half"),
    "context": ("every parameter", "", ""),
    "expert": ("router", "expert 0", "expert 1"),
}


def draw_who_sums_with_whom() -> Figure:
    """Three meshes of 2 × 2 ranks; a line joins the ranks that add up one gradient."""
    use()
    figure, panels = plt.subplots(1, 3, figsize=(9.4, 4.2), facecolor="white")
    for axes, (name, tokens) in zip(panels, _TOKENS.items(), strict=True):
        whole, left, right = _COPIES[name]
        corners = [(0, 0), (2, 0), (2, -2), (0, -2), (0, 0)]
        axes.plot(*zip(*corners, strict=True), color=TRUTH, lw=2, zorder=1)
        axes.text(1, 0.12, whole, ha="center", va="bottom", color=TRUTH, fontsize=9)
        for x, text, color in ((0, left, RANKS[0]), (2, right, RANKS[3])):
            if text:
                shift = -0.35 if x == 0 else 0.35
                axes.plot([x + shift] * 2, [0, -2], color=color, lw=4, zorder=1)
                axes.text(
                    x + 1.6 * shift,
                    -1,
                    text,
                    rotation=90,
                    ha="center",
                    va="center",
                    color=color,
                    fontsize=9,
                )
        for rank, of_rank in enumerate(tokens):
            _rank(axes, 2 * (rank % 2), -2 * (rank // 2), f"rank {rank}\n{of_rank}")
        axes.set_title(f"data ↓ × {name} →", fontsize=11)
        axes.set(xlim=(-0.95, 2.95), ylim=(-2.6, 0.65), aspect="equal")
        axes.set_axis_off()
    return figure


def _rank(axes: Axes, x: float, y: float, text: str) -> None:
    style = "round,pad=0,rounding_size=0.1"
    box = FancyBboxPatch(
        (x - 0.62, y - 0.35), 1.24, 0.7, boxstyle=style, fc="#F2F4F6", ec=TRUTH
    )
    axes.add_patch(box).set_zorder(2)
    axes.text(x, y, text, ha="center", va="center", color=TRUTH, fontsize=8, zorder=3)
