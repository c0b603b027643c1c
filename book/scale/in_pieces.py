"""For in_pieces.ipynb: the picture of who holds what, and the bytes that are sent;
training with local steps, and its losses.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labkit.book import figures
from labkit.book.figures import RANKS, TRUTH, use
from labkit.profiling.step_cost import step_cost
from labkit.scenarios.own_classes import draw_batch, held_out_loss, seeded_classifier
from labkit.testing.compare import weights

CHUNK = 64  # steps between two evaluations; every H of the chapter divides it

# `train(model, optimizer, batches, every)`, as the chapter defines it.
Train = Callable[..., None]

_PARTS = ("optimizer state", "gradients", "parameters")  # from the bottom up
_SHARDED = {
    "DDP": (),
    "ZeRO-1": _PARTS[:1],
    "ZeRO-2": _PARTS[:2],
    "fully sharded": _PARTS,
}


def draw_who_holds_what(world_size: int = 4) -> Figure:
    """One panel per way, one column per rank; filled parts are held there.

    Each quarter of a tensor has a color of its own, on whichever rank it is.
    """
    use()
    figure, panels = plt.subplots(1, len(_SHARDED), figsize=(9, 3.2), sharey=True)
    for axes, (way, sharded) in zip(panels, _SHARDED.items(), strict=True):
        for rank in range(world_size):
            for height, part in enumerate(_PARTS):
                bottom, share = height + 0.1, 0.8 / world_size
                held = [rank] if part in sharded else range(world_size)
                for quarter in held:
                    corner = rank, bottom + share * quarter
                    color = RANKS[quarter]
                    axes.add_patch(Rectangle(corner, 0.8, share, color=color, lw=0))
                whole = Rectangle(
                    (rank, bottom), 0.8, 0.8, fill=False, ec=TRUTH, lw=0.6
                )
                axes.add_patch(whole)
        axes.set_title(way, fontsize=11)
        axes.set(xlim=(-0.2, world_size), ylim=(0, len(_PARTS)), xlabel="rank")
        axes.set_xticks([r + 0.4 for r in range(world_size)], range(world_size))
        axes.set_yticks([h + 0.5 for h in range(len(_PARTS))], _PARTS)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def bytes_per_parameter(
    rank: int,
    world_size: int,
    model: nn.Sequential,
    loss: Callable[[nn.Module, slice], Tensor],
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> float:
    """What torch's `fully_shard` sends per step, times W/(W−1). Runs on each rank."""
    number = sum(parameter.numel() for parameter in model.parameters())
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, torch.float32)
    for part in (*model, model):
        if list(part.parameters()):
            fully_shard(part, mp_policy=policy)
    rows = slice(rank, None, world_size)
    optimizer = torch.optim.SGD(model.parameters())
    cost = step_cost(model, optimizer, lambda module: loss(module, rows))
    return cost.sent / number * world_size / (world_size - 1)


def train_on_ranks(
    rank: int,
    world_size: int,
    train: Train,
    every: int,
    own: bool,
    optimizer: Callable[[Any], Any],
    chunks: int = 4,
) -> dict[str, Any]:
    """Run `train` for `chunks` times 64 steps, on one rank.

    Returns the held-out `losses` at the start and after each chunk, the `bytes` of each
    call of `dist.all_reduce`, and the `weights` at the end.
    """
    model = seeded_classifier()
    stepping = optimizer(model.parameters())
    losses, sent, all_reduce = [held_out_loss(model)], [], dist.all_reduce

    def count(tensor: Tensor, *options: Any, **more: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *options, **more)

    with mock.patch.object(dist, "all_reduce", count):
        for chunk in range(chunks):
            steps = range(chunk * CHUNK, (chunk + 1) * CHUNK)
            batches = [draw_batch(rank, world_size, step, own) for step in steps]
            train(model, stepping, batches, every)
            losses.append(held_out_loss(model))
    return {"losses": losses, "bytes": sent, "weights": weights(model)}


def four_rounds(
    rank: int,
    world_size: int,
    outer_step: Callable[..., Any],
    lr: float,
    momentum: float,
) -> list[Tensor]:
    """Four rounds with a reader's outer step: after each, the common weights.

    In the fourth, a weight of the last rank is NaN.
    """
    common, velocity, seen = torch.ones(3), torch.zeros(3), []
    other = torch.ones(3), torch.zeros(3)  # a second tensor, in turns with the first
    for number in range(1, 5):
        # Stands for the inner steps, which move every rank on in its own way.
        share = (1 + rank) / (world_size + 1)  # 1/2 on average
        local = common - number * torch.tensor([4.0, 8.0, 12.0]) * share
        if number == 4 and rank == world_size - 1:
            local[2] = torch.nan
        common, velocity = outer_step(common, local, velocity, lr, momentum)
        other = outer_step(other[0], other[0] + number, other[1], lr, momentum)
        seen.append(common.clone())
    return seen


def draw_losses(runs: Mapping[tuple[bool, int], Sequence[float]]) -> Figure:
    """Held-out losses by (own classes or not, H): a panel per way to deal the data."""
    figures.use()
    figure, panels = plt.subplots(1, 2, figsize=(7.6, 3.4), sharey=True)
    titles = ("every rank has all classes", "each rank has its own classes")
    for own, axes, title in zip((False, True), panels, titles, strict=True):
        of_panel = [(every, losses) for (o, every), losses in runs.items() if o == own]
        for color, (every, losses) in zip(figures.RANKS, of_panel, strict=True):
            steps = range(0, CHUNK * len(losses), CHUNK)
            axes.plot(steps, losses, "o-", color=color, ms=4, label=f"H = {every}")
        axes.set(xlabel="steps", title=title)
    panels[0].set(ylabel="held-out loss")
    panels[1].legend()
    return figure
