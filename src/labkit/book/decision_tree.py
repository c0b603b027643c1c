"""A tree of questions, drawn from left to right: each answer ends in a numbered, colored leaf."""

from collections.abc import Mapping, Sequence
from itertools import count

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from labkit.book import figures

_BOX = {"boxstyle": "round,pad=0.35", "fc": "#f2f2f2", "ec": "#888888"}
_TEXT = {"ha": "center", "va": "center", "fontsize": 8.5, "color": "#222222"}
_COLUMNS = (1.45, 4.35, 7.1, 9.35)


def decision_tree(
    questions: Mapping[str, Mapping[str, Sequence[tuple[str, str]]]], colors: Mapping[str, str]
) -> Figure:
    """Draw `questions`: first answer → second answer → its leaves, as (third answer, verdict).

    Leaves are numbered from 1 in the order given. A third answer may be empty: then the second
    leads straight to its leaf. `colors` gives a verdict's color; any other verdict is drawn as
    wrong.
    """
    leaves = sum(len(ends) for answers in questions.values() for ends in answers.values())
    figure, axes = plt.subplots(figsize=(6.6, 0.62 * leaves + 0.3))
    axes.axis("off")
    axes.set(xlim=(0, 10.1), ylim=(leaves - 0.4, -0.6))
    first, second, third, last = _COLUMNS
    number = count()
    for question, answers in questions.items():
        branch_rows = []
        for answer, ends in answers.items():
            rows = [next(number) for _ in ends]
            middle = sum(rows) / len(rows)
            branch_rows.append(middle)
            axes.text(second, middle, answer, bbox=_BOX, **_TEXT)
            for row, (end, verdict) in zip(rows, ends, strict=True):
                _line(axes, (second, middle), (last, row))
                if end:
                    axes.text(third, row, end, bbox=_BOX, **_TEXT)
                _leaf(axes, last, row, verdict, colors.get(verdict, figures.WRONG))
        middle = sum(branch_rows) / len(branch_rows)
        axes.text(first, middle, question, bbox=_BOX, **_TEXT)
        for row in branch_rows:
            _line(axes, (first, middle), (second, row))
    return figure


def _line(axes: plt.Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Level at first, then a slope, then level again at the height of the end."""
    (x, y), (to_x, to_y) = start, end
    bend = x + 1.35
    axes.plot([x, bend, bend + 0.35, to_x], [y, y, to_y, to_y], color="#888888", lw=1, zorder=0)


def _leaf(axes: plt.Axes, x: float, row: int, verdict: str, color: str) -> None:
    box = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": color, "lw": 2}
    text = f"leaf {row + 1}\n{verdict}"
    axes.text(x, row, text, bbox=box, **(_TEXT | {"color": color}))
