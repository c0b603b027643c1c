"""For in_pieces.ipynb: the picture of who holds what."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from labkit.book.figures import RANKS, TRUTH, use

_PARTS = ("optimizer state", "gradients", "parameters")  # from the bottom up
_SHARDED = {
    "DDP": (),
    "ZeRO-1": _PARTS[:1],
    "ZeRO-2": _PARTS[:2],
    "fully sharded": _PARTS,
}


def draw_who_holds_what(world_size: int = 4) -> Figure:
    """One panel per way, one column per rank; filled parts are held there."""
    use()
    figure, panels = plt.subplots(1, len(_SHARDED), figsize=(9, 3.2), sharey=True)
    for axes, (way, sharded) in zip(panels, _SHARDED.items(), strict=True):
        for rank in range(world_size):
            for height, part in enumerate(_PARTS):
                share, first = (
                    (1 / world_size, rank / world_size) if part in sharded else (1, 0)
                )
                bottom = height + 0.1
                held = Rectangle(
                    (rank, bottom + 0.8 * first), 0.8, 0.8 * share, color=RANKS[rank]
                )
                whole = Rectangle(
                    (rank, bottom), 0.8, 0.8, fill=False, ec=TRUTH, lw=0.6
                )
                axes.add_patch(held)
                axes.add_patch(whole)
        axes.set_title(way, fontsize=11)
        axes.set(xlim=(-0.2, world_size), ylim=(0, len(_PARTS)), xlabel="rank")
        axes.set_xticks([r + 0.4 for r in range(world_size)], range(world_size))
        axes.set_yticks([h + 0.5 for h in range(len(_PARTS))], _PARTS)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure
