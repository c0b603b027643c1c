"""A picture of two orders: in which buckets become full, and in which they are launched."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.book.figures import RANKS, TRUTH

_INK = ("white", TRUTH, TRUTH, TRUTH)  # legible on `RANKS`


def launch_moments(filled: Sequence[int]) -> list[int]:
    """When each bucket is launched if buckets leave in the order 0, 1, 2, …

    `filled[t]` is the bucket that becomes full at moment t. Bucket k is launched once it and all
    buckets before it are full: `launch_moments([1, 0, 2]) == [1, 1, 2]`.

    Raises ValueError unless `filled` names each bucket once.
    """
    if sorted(filled) != list(range(len(filled))):
        raise ValueError(f"each of {len(filled)} buckets becomes full once, and not {list(filled)}")
    moments, latest = [], 0
    for bucket in range(len(filled)):
        latest = max(latest, filled.index(bucket))
        moments.append(latest)
    return moments


def draw_launch_order(filled: Mapping[str, Sequence[int]]) -> Figure:
    """Draw for each rank, by its name, when buckets become full and when they are launched."""
    figure, axes = plt.subplots(figsize=(6.4, 0.5 + 1.25 * len(filled)), facecolor="white")
    rows = []
    for number, (name, buckets) in enumerate(filled.items()):
        full, launched = 2.6 * number, 2.6 * number + 1
        rows += [(full, f"{name}: full"), (launched, "launched")]
        moments = launch_moments(buckets)
        places = _side_by_side(moments)
        for moment, bucket in enumerate(buckets):
            _box(axes, moment, full, bucket, 0.86)
            x, width = places[bucket]
            axes.plot([moment, x], [full + 0.3, launched - 0.3], color=TRUTH, lw=1)
            _box(axes, x, launched, bucket, width)
    moments = max(map(len, filled.values()))
    axes.set_yticks(*zip(*rows, strict=True))
    axes.set_xticks(range(moments), map(str, range(1, moments + 1)))
    axes.set(xlabel="moment during backward", xlim=(-0.6, moments - 0.4))
    axes.set_ylim(2.6 * len(filled) - 1, -0.6)
    axes.tick_params(axis="both", length=0)
    axes.spines[:].set_visible(False)
    return figure


def _side_by_side(moments: Sequence[int]) -> list[tuple[float, float]]:
    """(center, width) of each launched bucket: those of one moment share its place."""
    places = []
    for bucket, moment in enumerate(moments):
        together = [other for other, at in enumerate(moments) if at == moment]
        width = 0.86 / len(together)
        places.append((moment - 0.43 + (together.index(bucket) + 0.5) * width, width))
    return places


def _box(axes: Axes, x: float, y: float, bucket: int, width: float) -> None:
    color = RANKS[bucket % len(RANKS)]
    axes.barh(y, width, left=x - width / 2, height=0.6, color=color, edgecolor="white", lw=1.5)
    ink = _INK[bucket % len(RANKS)]
    axes.text(x, y, str(bucket), ha="center", va="center", color=ink, fontsize=10)
