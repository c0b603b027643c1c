"""Draw recordings as a figure.

`draw_together` shows two lanes per recording. The upper lane shows computation: forward, then
backward with one tick per gradient. The lower lane shows the rank's collectives, with a color and
a number for each bucket. A bar begins at its launch or at the end of the previous one, whichever
is later; a thin line above it begins at the launch. Communication that is still in flight after
backward is *exposed*: it makes the step longer. It is underlined, and its total is printed.

It shows times, which differ in every run: never compare its text.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.book.figures import RANKS, TRUTH, WRONG
from labkit.profiling.recording import RankRecording, Recording

_MS = 1e3
_FORWARD = "#C9CED3"
_BACKWARD = "#8D959C"
_OTHER = "#B8B8B8"  # a collective that carries no gradients
_INK = ("white", TRUTH, TRUTH, TRUTH)  # legible on `RANKS`
_HEIGHT = 0.36
_LETTER = 0.012  # of the width of the figure


def draw_together(recordings: Mapping[str, Recording], title: str = "") -> Figure:
    """Draw rank 0's step of several recordings, one below the other, on one time axis in ms.

    The background is white, so that the figure is legible on a dark page.

    Args:
        recordings: by name, from top to bottom; each begins at 0. A rank that begins early waits
            for the others in its first collective, so put a barrier before `with recorder:`.
        title: above the drawing.
    """
    steps = [one.shifted(-one.begin) for one in (r.ranks[0] for r in recordings.values())]
    lanes = [lane for name in recordings for lane in (name, "sends")]
    figure, axes = plt.subplots(
        figsize=(7.6, 1.1 + 0.95 * len(steps)), layout="constrained", facecolor="white"
    )
    width = max(one.end for one in steps) * _MS
    for row, one in enumerate(steps):
        _draw_compute(axes, one, 2.2 * row)
        _draw_collectives(axes, one, 2.2 * row + 0.8, width)
        _draw_exposed(axes, one, 2.2 * row + 0.8)
    axes.set_yticks([2.2 * row + lane for row in range(len(steps)) for lane in (0, 0.8)], lanes)
    axes.set(xlabel="ms", xlim=(0, width * 1.02), ylim=(2.2 * len(steps) - 0.75, -0.5))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_compute(axes: Axes, one: RankRecording, y: float) -> None:
    for begin, end, color in _passes(one):
        axes.barh(y, (end - begin) * _MS, left=begin * _MS, height=_HEIGHT, color=color)
    ready = [gradient.ready * _MS for gradient in one.gradients]
    axes.vlines(ready, y - _HEIGHT / 2, y + _HEIGHT / 2, color=TRUTH, linewidth=0.7)


def _passes(one: RankRecording) -> Iterator[tuple[float, float, str]]:
    """Forward and backward as (begin, end, color); backward lasts until its last gradient."""
    for begin, end in one.forwards:
        yield begin, end, _FORWARD
    if one.gradients:
        begin = one.forwards[-1][1] if one.forwards else one.begin
        yield begin, one.compute_end(), _BACKWARD


def _draw_collectives(axes: Axes, one: RankRecording, y: float, width: float) -> None:
    before = 0.0
    for collective in one.collectives:
        begin = min(max(collective.launched, before), collective.done)
        before = max(before, collective.done)
        number = collective.bucket
        color = _OTHER if number is None else RANKS[number % len(RANKS)]
        launched, left = collective.launched * _MS, begin * _MS
        length = (collective.done - begin) * _MS
        axes.hlines(y - _HEIGHT / 2 - 0.06, launched, left, color=color, linewidth=1.5)
        axes.vlines(launched, y - _HEIGHT / 2 - 0.06, y + _HEIGHT / 2, color=color, linewidth=1)
        axes.barh(y, length, left=left, height=_HEIGHT, color=color, edgecolor="white", lw=0.6)
        for label in (f"{number}: {_size(collective.bytes)}", f"{number}"):
            if number is not None and length > len(label) * _LETTER * width:
                place, ink = left + length / 2, _INK[number % len(RANKS)]
                axes.text(place, y, label, ha="center", va="center", fontsize=8, color=ink)
                break


def _draw_exposed(axes: Axes, one: RankRecording, y: float) -> None:
    for begin, end in one.exposed():
        left, width = begin * _MS, (end - begin) * _MS
        axes.barh(y + _HEIGHT / 2 + 0.12, width, left=left, height=0.12, color=WRONG)
    backward_ends = one.compute_end() * _MS
    axes.vlines(
        backward_ends, y - 1.0, y + _HEIGHT / 2 + 0.18, color=WRONG, linewidth=1, linestyle="--"
    )
    style = {"va": "center", "fontsize": 9, "color": WRONG, "textcoords": "offset points"}
    text = f"exposed {one.exposed_seconds() * _MS:.1f} ms"
    axes.annotate(text, (backward_ends, y - 0.8), xytext=(5, 0), **style)


def _size(nbytes: int) -> str:
    if nbytes < 2**10:
        return f"{nbytes} B"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 / 10 else f"{nbytes / 2**10:.1f} KiB"


def _legend() -> list[Any]:
    return [
        Patch(color=_FORWARD, label="forward"),
        Patch(color=_BACKWARD, label="backward, one tick per gradient"),
        Patch(color=RANKS[0], label="collectives, by number"),
        Patch(color=WRONG, label="exposed"),
    ]
