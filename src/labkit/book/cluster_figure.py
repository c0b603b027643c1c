"""A picture of a cluster: nodes, their GPUs, and a ring through all ranks."""

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from labkit.book.figures import RANKS, TRUTH, WRONG


def draw_ring_on_nodes(nodes: int, ranks_per_node: int, node_of: Callable[[int], int]) -> Figure:
    """Draw the ring 0 → 1 → … → 0; arrows that cross between nodes are in another color.

    `node_of(rank)` places each rank on a node; every node has to receive `ranks_per_node` of them.
    """
    world_size = nodes * ranks_per_node
    figure, axes = plt.subplots(figsize=(6.4, 2.5), facecolor="white")
    place: dict[int, tuple[float, float]] = {}
    filled = [0] * nodes
    columns = (ranks_per_node + 1) // 2
    width = columns + 0.7
    for node in range(nodes):
        corner = (node * (width + 0.9), 0.0)
        style = "round,pad=0,rounding_size=0.15"
        box = FancyBboxPatch(corner, width, 2.35, boxstyle=style, fc="#F2F4F6", ec=TRUTH, lw=1)
        axes.add_patch(box)
        axes.text(corner[0] + 0.1, 2.42, f"node {node}", va="bottom", fontsize=11, color=TRUTH)
    for rank in range(world_size):
        node = node_of(rank)
        seat = filled[node]
        filled[node] += 1
        # Clockwise: right along the upper row, back along the lower one. The first node begins in
        # its lower row, so that a ring in rank order crosses between neighbors.
        turn = seat if node else (seat + columns) % ranks_per_node
        upper = turn < columns
        column = turn if upper else ranks_per_node - 1 - turn
        place[rank] = (node * (width + 0.9) + 0.85 + column, 1.7 if upper else 0.65)
    for rank in range(world_size):
        peer = (rank + 1) % world_size
        crosses = node_of(rank) != node_of(peer)
        arrow = FancyArrowPatch(
            place[rank],
            place[peer],
            arrowstyle="-|>",
            mutation_scale=13,
            shrinkA=15,
            shrinkB=15,
            lw=2.2 if crosses else 1.4,
            color=WRONG if crosses else TRUTH,
            connectionstyle="arc3,rad=-0.12",
        )
        axes.add_patch(arrow)
    for rank, (x, y) in place.items():
        axes.plot(x, y, "o", ms=27, color=RANKS[node_of(rank) % len(RANKS)], zorder=3)
        ink = "white" if node_of(rank) % len(RANKS) == 0 else TRUTH
        axes.text(x, y, str(rank), ha="center", va="center", color=ink, zorder=4)
    axes.set(xlim=(-0.1, nodes * (width + 0.9) - 0.8), ylim=(-0.1, 2.8), aspect="equal")
    axes.set_axis_off()
    return figure
