"""For buckets_that_overlap.ipynb: a model whose gradients become ready in another order
on each rank, and a figure of when buckets are full and when they are launched.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from labkit.book.figures import RANKS, TRUTH
from labkit.launch.ranks import run_ranks
from labkit.profiling.recorded_ways import Way
from labkit.profiling.recording import RankRecording, Recorder
from labkit.scenarios.toy_steps import loss_of
from labkit.testing.compare import gradients


class EitherOrder(nn.Module):
    """Layers `a` and `b`, in the order given, and then `last`; all of one shape."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.a, self.b, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.order = order

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, 4) from (N, 4)."""
        for name in self.order:
            inputs = getattr(self, name)(inputs).tanh()
        return self.last(inputs)


class OneRank(NamedTuple):
    """What one rank saw.

    arrived: the layers in the order in which their gradients became ready.
    ready_at_launch: per all-reduce, in launch order, how many gradients were ready.
    right: whether the gradients of a, b, and last are the average over the ranks.
    """

    arrived: str
    ready_at_launch: list[int]
    right: list[bool]


def run_in_two_orders(make: Way) -> list[OneRank]:
    """One step on two ranks: rank 0 applies a then b, rank 1 b then a.

    `make(module, process_group)` makes what averages; see
    `labkit.profiling.recorded_ways`.
    """
    of_ranks = run_ranks(_step, 2, make, device="cpu")
    local = zip(*(own for _, own, _ in of_ranks), strict=True)
    wanted = [(one + other) / 2 for one, other in local]
    seen = []
    for recorded, _, found in of_ranks:
        right = [torch.allclose(*pair) for pair in zip(found, wanted, strict=True)]
        arrived = " ".join(gradient.parameter[0] for gradient in recorded.gradients)
        seen.append(OneRank(arrived, [one.after for one in recorded.order()], right))
    return seen


def _step(rank: int, make: Way) -> tuple[RankRecording, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = EitherOrder("ab" if rank == 0 else "ba")
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    loss_of(model(inputs)).backward()
    own = gradients(model)
    model.zero_grad()
    recorder = Recorder(model)
    averager = make(model, recorder)
    with recorder:
        loss_of(averager(inputs)).backward()
        if hasattr(averager, "finish"):
            averager.finish()
    return recorder.recorded, own, gradients(model)


_INK = ("white", TRUTH, TRUTH, TRUTH)  # legible on `RANKS`


def launch_moments(filled: Sequence[int]) -> list[int]:
    """When each bucket is launched if buckets leave in the order 0, 1, 2, …

    `filled[t]` is the bucket that becomes full at moment t. Bucket k is launched once
    it and all buckets before it are full:
    `launch_moments([1, 0, 2]) == [1, 1, 2]`.

    Raises ValueError unless `filled` names each bucket once.
    """
    if sorted(filled) != list(range(len(filled))):
        raise ValueError(
            f"each of {len(filled)} buckets becomes full once, and not {list(filled)}"
        )
    moments, latest = [], 0
    for bucket in range(len(filled)):
        latest = max(latest, filled.index(bucket))
        moments.append(latest)
    return moments


def draw_launch_order(filled: Mapping[str, Sequence[int]]) -> Figure:
    """Draw per rank, by its name, when buckets become full and are launched."""
    figure, axes = plt.subplots(
        figsize=(6.4, 0.5 + 1.25 * len(filled)), facecolor="white"
    )
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
    axes.barh(
        y, width, left=x - width / 2, height=0.6, color=color, edgecolor="white", lw=1.5
    )
    ink = _INK[bucket % len(RANKS)]
    axes.text(x, y, str(bucket), ha="center", va="center", color=ink, fontsize=10)
