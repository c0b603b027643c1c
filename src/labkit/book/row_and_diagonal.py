"""The directive `combined`: four samples on the front page, and what each step makes of them.

    ```{combined} unequal-counts
    ```

The argument is one of `STATES`. Where it stands, a still picture shows the samples, how much each
weighs in what the optimizer gets, and that gradient against the one of one process. With
JavaScript, one figure stays in view instead, and the section that is read sets its state.

This module is a Sphinx extension; `_config.yml` names it.
"""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from bs4 import BeautifulSoup, Tag
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from labkit.book.playable import FOLDER
from labkit.book.result_tables import said

SAMPLES = ((2.0, 1.0), (-1.0, 0.0), (-2.0, -1.0), (1.0, 3.0))
WEIGHTS = (1.0, 0.0)  # of the model a·x + b, before the step

N = len(SAMPLES)
# The loss of a rank, by its number of samples and the number of ranks: what each sample weighs.
SHARES: dict[str, Callable[[int, int], Fraction]] = {
    "losses.mean()": lambda own, ranks: Fraction(1, own),
    "losses.sum() / N": lambda own, ranks: Fraction(1, N),
    "losses.sum() * W / N": lambda own, ranks: Fraction(ranks, N),
}
Vector = tuple[float, float]

CELL, LEFT, TOP = 37, 62, 66  # pixels: the grid of ranks (rows) and samples (columns)
CENTER, RADIUS = (290, 112), 60  # of the circle at which the right gradient ends
HEAD = 13
SHARED = '<use href="#four-samples"/>'


class State(NamedTuple):
    """One way to distribute the samples and to combine the gradients."""

    counts: tuple[int, ...]
    """samples per rank, in order"""
    loss: str = "losses.mean()"
    """one of `SHARES`"""
    combined: str = "average"
    """over the ranks: average, sum, or nothing"""
    adam: bool = False
    """show the step of Adam, too"""


STATES = {
    "row-and-diagonal": State((1, 1, 1, 1)),
    "equal-counts": State((2, 2)),
    "unequal-counts": State((1, 3)),
    "divided-by-n": State((1, 3), "losses.sum() / N"),
    "times-w": State((1, 3), "losses.sum() * W / N"),
    "calling-module": State((2, 2), combined="nothing"),
    "a-sum-instead": State((2, 2), combined="sum"),
    "adam-hides-it": State((2, 2), combined="sum", adam=True),
}


class Outcome(NamedTuple):
    """A gradient against the right one: its length, the cosine, and the angle in degrees."""

    ratio: float
    cosine: float
    angle: float


def weights(state: State) -> list[Fraction]:
    """What each sample weighs in what its rank's optimizer gets."""
    ranks = len(state.counts)
    over = ranks if state.combined == "average" else 1
    return [SHARES[state.loss](own, ranks) / over for own in state.counts for _ in range(own)]


def gradient(shares: Iterable[Fraction | float], first: int = 0) -> Vector:
    """The gradient (slope, offset) of squared errors; `shares` belong to samples from `first`."""
    a, b = 0.0, 0.0
    for share, (x, y) in zip(shares, SAMPLES[first:], strict=False):
        error = WEIGHTS[0] * x + WEIGHTS[1] - y
        a, b = a + float(share) * 2 * error * x, b + float(share) * 2 * error
    return a, b


def optimizers_get(state: State) -> list[Vector]:
    """The gradient on each rank after the backward pass; only one if all ranks have the same."""
    of_samples = weights(state)
    if state.combined != "nothing":
        return [gradient(of_samples)]
    return [gradient(of_samples[begin:end], begin) for begin, end in _parts(state)]


def compared(found: Vector, right: Vector) -> Outcome:
    """How `found` differs from `right`."""
    long, right_long = math.hypot(*found), math.hypot(*right)
    across = right[0] * found[1] - right[1] * found[0]
    along = right[0] * found[0] + right[1] * found[1]
    cosine = along / (long * right_long)
    return Outcome(long / right_long, cosine, math.degrees(math.atan2(across, along)))


def adams_step(of: Vector) -> Vector:
    """Adam's first step, over −lr: each moment is corrected to g and g²."""
    return of[0] / abs(of[0]), of[1] / abs(of[1])


def outcomes(state: State) -> list[Outcome]:
    """The arrows of a state: per optimizer, and with Adam also that of its step."""
    right, found = gradient([1 / N] * N), optimizers_get(state)
    if state.adam:
        return [compared(found[0], right), compared(adams_step(found[0]), adams_step(right))]
    return [compared(one, right) for one in found]


def description(state: State) -> str:
    """The picture in words."""
    shared = ", ".join(str(share) for share in weights(state))
    last = "; ".join(f"{said(*one[:2])}, {_numbers(one)}" for one in outcomes(state))
    whose = " The gradient, then Adam's step" if state.adam else " What the optimizer gets"
    return (
        f"Samples per rank: {', '.join(map(str, state.counts))}. They weigh {shared}."
        f"{whose}, against that of one process: {last}."
    )


def _parts(state: State) -> list[tuple[int, int]]:
    """Each rank's first sample, and the one after its last."""
    return list(pairwise([sum(state.counts[:rank]) for rank in range(len(state.counts) + 1)]))


def _numbers(one: Outcome) -> str:
    return f"ratio {one.ratio:.2f}, cosine {one.cosine:.2f}"


# ---- drawing ------------------------------------------------------------------------------------


def picture(state: State) -> str:
    """The state as SVG. What the script moves or rewrites has the attribute `data-part`."""
    drawn = [_fixed(), *_grid(state), *_compass(state)]
    return (
        f'<svg viewBox="0 0 440 256" role="img" aria-label="{description(state)}">'
        f"{''.join(drawn)}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "", part: str = "", style: str = "") -> str:
    """A text; `kind` is its class."""
    given = {"class": kind, "data-part": part, "style": style}
    written = "".join(f' {name}="{value}"' for name, value in given.items() if value)
    return f'<text x="{x}" y="{y}"{written}>{text}</text>'


def _at(x: float, y: float) -> str:
    return f"transform:translate({x:.4g}px,{y:.4g}px)"


def _cell(sample: int, weight: str, x: int, y: int, part: str = "") -> str:
    named, weighs = (f' data-part="{part}"', f"{part}-weight") if part else ("", "")
    return (
        f'<g class="four-cell four-{sample}"{named} style="{_at(x, y)}">'
        f'<rect width="35" height="35" rx="4"/>'
        f"{_text(17.5, 22, weight, 'four-mid', weighs)}</g>"
    )


def _rank(rank: int) -> str:
    boxes = "".join(f"M{LEFT + CELL * sample}.5 .5h34v34h-34z" for sample in range(N))
    name = _text(LEFT - 6, 22, f"rank {rank}", "four-end four-small")
    return f'<path class="four-box" d="{boxes}"/>{name}'


def _fixed() -> str:
    """What all states have: the names of samples, the row of one process, and two ranks."""
    drawn = [_text(LEFT - 6, 40, "1 process", "four-end four-small")]
    for i in range(N):
        drawn += [_text(LEFT + CELL * i + 17.5, 12, f"g{'₁₂₃₄'[i]}", "four-mid")]
        drawn += [_cell(i + 1, f"1/{N}", LEFT + CELL * i, 18)]
    drawn += [f'<g style="{_at(0, TOP + CELL * rank)}">{_rank(rank)}</g>' for rank in range(2)]
    return "".join(drawn)


def _grid(state: State) -> list[str]:
    """A row per rank, and the code."""
    ranks = len(state.counts)
    drawn = [
        f'<g data-part="rank{rank}" style="opacity:{1 if rank < ranks else 0};'
        f'{_at(0, TOP + CELL * rank)}">{_rank(rank)}</g>'
        for rank in range(2, N)
    ]
    rows = [rank for rank, own in enumerate(state.counts) for _ in range(own)]
    for i, (share, rank) in enumerate(zip(weights(state), rows, strict=True)):
        drawn += [_cell(i + 1, str(share), LEFT + CELL * i, TOP + CELL * rank, f"cell{i}")]
    how = {
        "average": f"DDP averages over W = {ranks}",
        "sum": f"summed over W = {ranks}",
        "nothing": "ddp.module(x): nothing is averaged",
    }[state.combined]
    below = _at(0, TOP + CELL * ranks)
    return [
        *drawn,
        _text(4, 16, f"loss = {state.loss}", "four-code", "loss", below),
        _text(4, 33, how, "four-small", "how", below),
    ]


def _compass(state: State) -> list[str]:
    """The weighted gradients, end to end, and the arrows, in the frame of the right gradient."""
    (x, y), right = CENTER, gradient([1 / N] * N)
    what = "Adam's step" if state.adam else "what the optimizer gets"
    drawn = [
        _text(x + 48, 12, what, "four-mid", "what"),
        f'<circle class="four-ring" cx="{x}" cy="{y}" r="{RADIUS}"/>',
        f'<circle class="four-dot" cx="{x + RADIUS}" cy="{y}" r="8"/>',
    ]
    starts = {begin for begin, _ in _parts(state)} if state.combined == "nothing" else {0}
    to_x, to_y = 0.0, 0.0
    for sample, share in enumerate(weights(state)):
        if sample in starts:
            to_x, to_y = float(x), float(y)
        piece = compared(gradient([share], sample), right)
        long, turn = RADIUS * piece.ratio, math.radians(piece.angle)
        drawn += [
            f'<path class="four-piece four-{sample + 1}" data-part="piece{sample}" d="M0 0h1" '
            f'style="{_at(to_x, to_y)} rotate({-piece.angle:.4g}deg) scale({long:.4g},1)"/>'
        ]
        to_x, to_y = to_x + long * math.cos(turn), to_y - long * math.sin(turn)
    found = outcomes(state)
    drawn += [_arrow(i, found[min(i, len(found) - 1)], state.adam and i == 0) for i in range(2)]
    verdict = said(found[-1].ratio, found[-1].cosine)
    mark = "✓" if verdict == "right" else "✗"
    each = "each rank: " * (state.combined == "nothing")
    kind = "four-mid four-verdict" + " wrong" * (verdict != "right")
    numbers = "the gradient: " * state.adam + _numbers(found[0])
    drawn += [
        _text(x + 48, 234, f"{each}{mark} {verdict}", kind, "verdict"),
        _text(x + 48, 251, numbers, "four-mid four-small", "numbers"),
    ]
    return drawn


def _arrow(number: int, one: Outcome, faint: bool) -> str:
    long = RADIUS * one.ratio
    wrong = said(one.ratio, one.cosine) != "right"
    kind = "four-arrow" + " wrong" * wrong + " four-faint" * faint
    turned = f"{_at(*CENTER)} rotate({-one.angle:.4g}deg)"
    return (
        f'<g class="{kind}" data-part="arrow{number}" style="{turned}">'
        f'<path d="M0 0h1" data-part="shaft{number}" style="transform:scale({long - HEAD:.4g},1)"/>'
        f'<path class="four-head" d="M0 0l-14 -7v14z" data-part="head{number}" '
        f'style="{_at(long, 0)}"/></g>'
    )


# ---- the page -----------------------------------------------------------------------------------


class CombinedDirective(SphinxDirective):
    """Put a state here; see the module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if self.arguments[0] not in STATES:
            raise self.error(f"{self.arguments[0]!r} is none of {', '.join(STATES)}")
        drawn = picture(STATES[self.arguments[0]])
        figure = f'<figure class="row-and-diagonal">{drawn}</figure>\n'
        return [nodes.raw("", figure, format="html")]


def staged(body: str) -> str:
    """The HTML of a page with its states in one box, and in it the figure that stays in view."""
    head, *rest = body.split(_fixed())
    shared = f'{head}<g id="four-samples">{_fixed()}</g>{SHARED.join(rest)}'
    page = BeautifulSoup(shared, "html.parser")
    sections = [figure.parent for figure in page.select("section > figure.row-and-diagonal")]
    text = sections[0].wrap(page.new_tag("div", attrs={"class": "states"}))
    text.extend(sections[1:])
    story = text.wrap(page.new_tag("div", attrs={"class": "row-and-diagonal-story"}))
    story.insert(0, _stage(next(iter(STATES.values()))))
    return str(page)


def _stage(first: State) -> Tag:
    hidden = picture(first).replace(_fixed(), SHARED).replace("<svg ", '<svg aria-hidden="true" ')
    made = BeautifulSoup(
        f'<div class="row-and-diagonal stage">{hidden}<div class="steps">'
        '<button type="button" aria-label="Previous state">←</button><span role="status"></span>'
        '<button type="button" aria-label="Next state">→</button></div></div>',
        "html.parser",
    ).div
    assert made
    return made


def _put_on_stage(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.Node
) -> None:
    if '<figure class="row-and-diagonal">' in context.get("body", ""):
        context["body"] = staged(context["body"])
        folder = FOLDER.relative_to("_static").as_posix()
        app.add_js_file(f"{folder}/row_and_diagonal.js", loading_method="defer")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("combined", CombinedDirective)
    app.connect("html-page-context", _put_on_stage)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
