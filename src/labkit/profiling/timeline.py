"""A recording, seen: one figure, or one file for a trace viewer.

`draw` shows two lanes a rank. Above, what it computes: forward, then backward with a tick for each
gradient that became ready. Below, its collectives, a color and a number for each bucket, from their
launch (a thin line above, while they wait behind the one before) to their end. What is still under
way when backward has ended is *exposed*: the step is longer by it. It is underlined and summed.
`draw_together` shows one rank of several recordings so, one below another.

`save_trace` writes the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

Both show times, which differ at every run: never compare their text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.book.figures import RANKS, TRUTH, WRONG
from labkit.profiling.recording import Collective, RankRecording, Recording

_MS = 1e3
_US = 1e6
_FORWARD = "#C9CED3"
_BACKWARD = "#8D959C"
_OTHER = "#B8B8B8"  # a collective that carries no gradients
_INK = ("white", TRUTH, TRUTH, TRUTH)  # legible on `RANKS`
_HEIGHT = 0.36
_LETTER = 0.012  # of the width of the figure


def draw(recording: Recording, title: str | None = None) -> Figure:
    """Draw the step: time in ms to the right, two lanes a rank.

    A bar in the lower lane begins at its launch or at the end of the one before, whichever is
    later; the thin line above goes back to its launch. The figure has a white ground, so that
    it is legible on a dark page too.
    """
    ranks = recording.ranks
    lanes = [f"rank {one.rank} {lane}" for one in ranks for lane in ("computes", "sends")]
    return _draw_rows(ranks, lanes, title or _sentence(recording))


def draw_together(
    recordings: Mapping[str, Recording], rank: int = 0, title: str | None = None
) -> Figure:
    """Draw one rank's step of several recordings below each other, on one axis of time.

    Args:
        recordings: by name, from top to bottom; each begins at 0.
        rank: which rank of each. One that begins before the others waits for them in its first
            collective: let all begin together, with a barrier before `with recorder:`.
    """
    steps = [recording.ranks[rank] for recording in recordings.values()]
    lanes = [lane for name in recordings for lane in (name, "sends")]
    return _draw_rows([one.shifted(-one.begin) for one in steps], lanes, title)


def _draw_rows(steps: Sequence[RankRecording], lanes: Sequence[str], title: str | None) -> Figure:
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
    axes.set_title(title or "", loc="left", fontsize=11)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def save_trace(recording: Recording, path: str | PathLike[str]) -> None:
    """Write the step as a trace: a process a rank; times in µs, as the format has them.

    Thread 0 holds the forward and backward passes and, as instants, the gradients; the others
    hold the collectives, as many as were ever under way at once.
    """
    events = [event for one in recording.ranks for event in _events(one)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1))


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
        color = _color(collective)
        launched, left = collective.launched * _MS, begin * _MS
        length = (collective.done - begin) * _MS
        axes.hlines(y - _HEIGHT / 2 - 0.06, launched, left, color=color, linewidth=1.5)
        axes.vlines(launched, y - _HEIGHT / 2 - 0.06, y + _HEIGHT / 2, color=color, linewidth=1)
        axes.barh(y, length, left=left, height=_HEIGHT, color=color, edgecolor="white", lw=0.6)
        for label in (f"{collective.bucket}: {_size(collective.bytes)}", f"{collective.bucket}"):
            if collective.bucket is not None and length > len(label) * _LETTER * width:
                place = left + length / 2
                ink = _INK[collective.bucket % len(RANKS)]
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


def _color(collective: Collective) -> str:
    return _OTHER if collective.bucket is None else RANKS[collective.bucket % len(RANKS)]


def _size(nbytes: int) -> str:
    if nbytes < 2**10:
        return f"{nbytes} B"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 / 10 else f"{nbytes / 2**10:.1f} KiB"


def _sentence(recording: Recording) -> str:
    buckets = len(recording.ranks[0].buckets())
    worst = max(one.exposed_seconds() for one in recording.ranks) * _MS
    collectives = "collective" if buckets == 1 else "collectives"
    return f"{buckets} {collectives} of gradients; at most {worst:.1f} ms exposed"


def _legend() -> list[Any]:
    return [
        Patch(color=_FORWARD, label="forward"),
        Patch(color=_BACKWARD, label="backward, one tick per gradient"),
        Patch(color=RANKS[0], label="collectives, by number"),
        Patch(color=WRONG, label="exposed"),
    ]


def _events(one: RankRecording) -> Iterator[dict[str, Any]]:
    rows = list(_rows(one.collectives))
    last = max(rows, default=0) + 1
    threads = {0: "computes", **{row: f"sends {row}" for row in rows}, last: "exposed"}

    def span(tid: int, name: str, begin: float, end: float, **args: int) -> dict[str, Any]:
        when = {"ts": begin * _US, "dur": (end - begin) * _US}
        return {"ph": "X", "pid": one.rank, "tid": tid, "name": name, **when, "args": args}

    def label(what: str, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": one.rank, "tid": tid, "name": what, "args": {"name": name}}

    yield label("process_name", 0, f"rank {one.rank}")
    for tid, name in threads.items():
        yield label("thread_name", tid, name)
    for begin, end, color in _passes(one):
        yield span(0, "forward" if color == _FORWARD else "backward", begin, end)
    for gradient in one.gradients:
        instant = span(0, f"{gradient.parameter}.grad", gradient.ready, gradient.ready)
        yield {**instant, "ph": "i", "s": "t", "args": {"bytes": gradient.bytes}}
    for row, collective in zip(rows, one.collectives, strict=True):
        bucket = "" if collective.bucket is None else f" {collective.bucket}"
        yield span(
            row,
            f"{collective.op}{bucket}",
            collective.launched,
            collective.done,
            bytes=collective.bytes,
            gradients_ready_at_launch=collective.after,
        )
    for begin, end in one.exposed():
        yield span(last, "exposed", begin, end)


def _rows(collectives: tuple[Collective, ...]) -> Iterator[int]:
    """For each collective a row, from 1, in which none overlaps another: viewers ask for that."""
    free_at: list[float] = []
    for one in collectives:
        row = next((row for row, at in enumerate(free_at) if at <= one.launched), len(free_at))
        free_at[row : row + 1] = [one.done]
        yield row + 1
