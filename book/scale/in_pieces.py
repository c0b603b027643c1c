"""For in_pieces.ipynb: the picture of who holds what, and the bytes that are sent."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labkit.book.figures import RANKS, TRUTH, use
from labkit.profiling.step_cost import step_cost

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
