"""For in_the_wrapper.ipynb.

1. A model in which a rank may leave out a branch, and what DDP's error says about it.
2. A figure of `no_sync` in a step.
"""

import re
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from labkit.book import figures
from labkit.testing.compare import Verdicts

_AVERAGED = figures.RANKS[0]


class TwoBranches(nn.Module):
    """Inputs (B, 6) → (B, 1). Samples with a mean above 1 also use `right`.

    A batch without such a sample gives `right` no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.body = nn.Linear(6, 8)
            self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        outputs = self.left(hidden)
        rare = x.mean(1, keepdim=True) > 1
        if rare.any():
            outputs = outputs + rare * self.right(hidden)
        return outputs


def headline(error: Exception) -> str:
    """The first sentence of DDP's error, and the parameters that it names, sorted."""
    text = str(error)
    names = re.search(
        r"Parameters which did not receive grad for (rank \d+): (.*)", text
    )
    first = text.split(". ")[0].split(" in the prior")[0]
    if not names:
        return first
    return f"{first}\n{names[1]} lacks {', '.join(sorted(names[2].split(', ')))}"


def no_sync_timeline(
    places: Mapping[str, Sequence[tuple[bool, bool]]], tried: Verdicts
) -> Figure:
    """Per placement of `no_sync`, its micro-batches as forward and backward boxes.

    Args:
        places: for each, one pair per micro-batch: whether its forward is under
            `no_sync`, and whether its backward is.
        tried: with the number of collectives in each of these backwards as notes.
    """
    launched = {verdict.variant: verdict.notes for verdict in tried}
    figures.use()
    figure, _ = plt.subplots(
        len(places), 1, figsize=(6.4, 0.95 * len(places) + 0.3), sharex=True
    )
    for axes, (name, micro_batches) in zip(figure.axes, places.items(), strict=True):
        for number, inside in enumerate(micro_batches):
            count = launched[name][number]
            _micro_batch(axes, 4.0 * number, number + 1, *inside, count > 0)
        axes.set(
            xlim=(-0.1, 4.0 * len(micro_batches)),
            ylim=(-0.75, 1.5),
            yticks=[],
            xticks=[],
        )
        axes.set_title(f"no_sync around {name}", fontsize=10, pad=2)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.axes[-1].set_xlabel(
        "time → (gray: inside no_sync; blue: an all-reduce)", fontsize=9
    )
    return figure


def _micro_batch(
    axes: Axes, start: float, number: int, forward: bool, backward: bool, launched: bool
) -> None:
    for offset, width, inside, name in (
        (0.0, 1.3, forward, f"forward {number}"),
        (1.5, 2.0, backward, f"backward {number}"),
    ):
        left = start + offset
        if inside:
            gray = Rectangle(
                (left - 0.08, -0.12), width + 0.16, 1.24, color="#bbbbbb", lw=0
            )
            axes.add_patch(gray)
        axes.add_patch(
            Rectangle((left, 0), width, 1, facecolor="white", edgecolor="#444444")
        )
        axes.text(left + width / 2, 0.5, name, ha="center", va="center", fontsize=9)
    if launched:
        axes.add_patch(Rectangle((start + 2.3, -0.6), 1.2, 0.4, color=_AVERAGED))
