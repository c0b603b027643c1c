"""For sum_or_average.ipynb.

1. One weight's gradient on each of four devices: parts under DataParallel, wholes under
DDP.
2. Which learning rate a data-parallel run needs: a figure instead of a table.
"""

from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from labkit.book import figures
from labkit.launch.ranks import run_ranks
from labkit.scenarios.sum_and_average import (
    BATCH,
    COMBINATIONS,
    LEARNING_RATE,
    LOSSES,
    batches,
    combined_factor,
    matching_lr,
    seeded_model,
)

DEVICES = 4


class Shares(NamedTuple):
    """The gradient of one element of the last bias.

    `parts`: per device, of the mean loss over all samples. `wholes`: per rank, of the
    mean loss over its own samples. `seen_by_parallel` and `seen_by_ddp`: what an
    optimizer gets.
    """

    parts: list[float]
    wholes: list[float]
    seen_by_parallel: float
    seen_by_ddp: float


def parts_and_wholes(data: TensorDataset) -> Shares:
    """Measure both on one batch of 16 samples. Starts four ranks."""
    x, y = next(iter(batches(data, BATCH)))
    parts, seen_by_parallel = _under_data_parallel(x, y)
    of_ranks = run_ranks(_under_ddp, DEVICES, x, y, device="cpu")
    wholes, averages = zip(*of_ranks, strict=True)
    return Shares(parts, list(wholes), seen_by_parallel, averages[0])


def _under_data_parallel(x: Tensor, y: Tensor) -> tuple[list[float], float]:
    # A replica's weights are differentiable copies of the model's, as in
    # torch.nn.DataParallel.
    model = seeded_model()
    replicas = [
        {k: p.clone() for k, p in model.named_parameters()} for _ in range(DEVICES)
    ]
    for replica in replicas:
        replica["2.bias"].retain_grad()
    pairs = zip(replicas, x.chunk(DEVICES), strict=True)
    outputs = [functional_call(model, replica, chunk) for replica, chunk in pairs]
    F.cross_entropy(torch.cat(outputs), y).backward()
    return [_element(r["2.bias"].grad) for r in replicas], _element(model[2].bias.grad)


def _under_ddp(rank: int, x: Tensor, y: Tensor) -> tuple[float, float]:
    model = seeded_model()
    ddp = DistributedDataParallel(model)
    wholes: list[float] = []
    # A hook on a parameter sees this rank's gradient, before the average.
    model[2].bias.register_hook(lambda gradient: wholes.append(_element(gradient)))
    F.cross_entropy(ddp(x.chunk(DEVICES)[rank]), y.chunk(DEVICES)[rank]).backward()
    return wholes[0], _element(model[2].bias.grad)


def _element(bias: Tensor) -> float:
    return bias[2].item()


_CENTERED = {"ha": "center", "va": "center"}
_NAMES = {"mean": "mean over its own\nsamples", "sum": "sum over its own\nsamples"}
_HEADINGS = {
    "average": "gradients averaged\n(DDP)",
    "sum": "gradients summed\n(comm hook)",
}


def learning_rates(world_size: int = 2) -> Figure:
    """A panel per batch of a step: one process's batch, and `world_size` times it."""
    figure, axes = plt.subplots(1, 2, figsize=(8.8, 3.4), sharey=True)
    titles = (
        f"{BATCH} samples per step in all, {BATCH // world_size} per rank",
        f"{BATCH * world_size} in all, {BATCH} per rank",
    )
    for ax, batch, title in zip(axes, (BATCH, BATCH * world_size), titles, strict=True):
        _panel(ax, batch, world_size)
        ax.set_title(title, fontsize=10.5)
    axes[0].set_ylabel("loss of a rank")
    patches = [
        Patch(color=figures.RANKS[2] + "55", label=f"{LEARNING_RATE:g}, unchanged"),
        Patch(color=figures.RANKS[1] + "55", label="another learning rate"),
    ]
    figure.legend(handles=patches, loc="outside lower right", ncols=2, fontsize=9)
    return figure


def _panel(ax: Axes, batch: int, world_size: int) -> None:
    for row, loss in enumerate(LOSSES):
        for column, combine in enumerate(COMBINATIONS):
            lr = matching_lr(loss, combine, world_size, batch)
            factor = combined_factor(loss, combine, world_size)
            approximate = batch != BATCH
            kept = lr == LEARNING_RATE
            color = figures.RANKS[2] if kept else figures.RANKS[1]
            corner = column + 0.03, row + 0.03
            ax.add_patch(plt.Rectangle(corner, 0.94, 0.94, color=color + "55"))
            text = f"{'≈ ' if approximate else ''}{lr:g}"
            ax.text(column + 0.5, row + 0.42, text, fontsize=15, **_CENTERED)
            gradient = f"gradient × {factor:g}"
            ax.text(column + 0.5, row + 0.78, gradient, fontsize=8.5, **_CENTERED)
    ax.set(xlim=(0, 2), ylim=(2, 0), xticks=(0.5, 1.5), yticks=(0.5, 1.5))
    ax.set_xticklabels([_HEADINGS[c] for c in COMBINATIONS], fontsize=9)
    ax.set_yticklabels([_NAMES[loss] for loss in LOSSES], fontsize=9)
    ax.tick_params(length=0)
    ax.set_frame_on(False)
