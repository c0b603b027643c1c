"""For by_hand_or_ddp.ipynb: two steps that tell strategies apart, and a figure.

A *strategy* is a pair `(wrap, average)`: `wrap(model)` returns what is called for the
forward, and `average(model)` runs after backward. By hand, `wrap` returns the model
itself; DDP's `average` does nothing.
"""

from collections import Counter
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from torch import Tensor, nn

from labkit.book.figures import RANKS, TRUTH, WRONG
from labkit.launch.ranks import run_ranks

Strategy = tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], object]]


class TwoHeads(nn.Module):
    """A shared layer and two heads. `both=False` leaves the second head out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: Tensor, both: bool = True) -> Tensor:
        """The heads' outputs added up: (N, 1) from (N, 4)."""
        hidden = self.body(inputs).tanh()
        return self.first(hidden) + self.second(hidden) if both else self.first(hidden)


def after_different_seeds(strategy: Strategy) -> str:
    """One SGD step from weights that each rank draws: "equal" or "different"
    replicas.
    """
    one, other = run_ranks(_weights_after_a_step, 2, *strategy, device="cpu")
    return "equal" if all(map(torch.equal, one, other)) else "different"


def with_a_gradient_missing_on_rank_1(strategy: Strategy) -> str:
    """Two steps in which rank 1 leaves a head out: "averaged", "wrong", or the
    error.
    """
    try:
        of_ranks = run_ranks(
            _head_without_a_gradient, 2, *strategy, device="cpu", timeout=20
        )
    except (AttributeError, RuntimeError) as error:
        return f"raises {type(error).__name__}"
    right = all(torch.allclose(found, wanted) for found, wanted in of_ranks)
    return "averaged" if right else "wrong"


def _inputs(rank: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))


def _weights_after_a_step(
    rank: int,
    wrap: Callable[[nn.Module], nn.Module],
    average: Callable[[nn.Module], object],
) -> list[Tensor]:
    torch.manual_seed(rank)
    model = TwoHeads()
    forward = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward(_inputs(rank)).mean().backward()
    average(model)
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _head_without_a_gradient(
    rank: int,
    wrap: Callable[[nn.Module], nn.Module],
    average: Callable[[nn.Module], object],
) -> tuple[Tensor, Tensor]:
    """The second head's averaged gradient, and the value that it should have: half of
    rank 0's own gradient.
    """
    torch.manual_seed(0)
    model = TwoHeads()
    model(_inputs(0)).mean().backward()
    wanted = model.second.weight.grad / 2
    model.zero_grad()
    forward = wrap(model)
    for _ in range(2):  # DDP reports an incomplete reduction in the next forward
        model.zero_grad()
        forward(_inputs(rank), both=rank == 0).mean().backward()
        average(model)
    return model.second.weight.grad, wanted


def draw_ring_on_nodes(
    nodes: int, ranks_per_node: int, node_of: Callable[[int], int]
) -> Figure:
    """Draw the ring 0 → 1 → … → 0; arrows that cross between nodes have another color.

    `node_of(rank)` places each rank on a node; every node has to receive
    `ranks_per_node` of them.
    """
    world_size = nodes * ranks_per_node
    figure, axes = plt.subplots(figsize=(6.4, 2.5), facecolor="white")
    width = (ranks_per_node + 1) // 2 + 0.7
    for node in range(nodes):
        _node(axes, node * (width + 0.9), width, f"node {node}")
    place = _places([node_of(rank) for rank in range(world_size)], ranks_per_node)
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
    for rank, (x, y) in enumerate(place):
        axes.plot(x, y, "o", ms=27, color=RANKS[node_of(rank) % len(RANKS)], zorder=3)
        ink = "white" if node_of(rank) % len(RANKS) == 0 else TRUTH
        axes.text(x, y, str(rank), ha="center", va="center", color=ink, zorder=4)
    axes.set(xlim=(-0.1, nodes * (width + 0.9) - 0.8), ylim=(-0.1, 2.8), aspect="equal")
    axes.set_axis_off()
    return figure


def _node(axes: Axes, left: float, width: float, name: str) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=0.15", "fc": "#F2F4F6"}
    axes.add_patch(FancyBboxPatch((left, 0.0), width, 2.35, ec=TRUTH, lw=1, **style))
    axes.text(left + 0.1, 2.42, name, va="bottom", fontsize=11, color=TRUTH)


def _places(nodes: list[int], ranks_per_node: int) -> list[tuple[float, float]]:
    """Where each rank is drawn; `nodes[rank]` is its node."""
    columns = (ranks_per_node + 1) // 2
    places, filled = [], Counter[int]()
    for node in nodes:
        seat = filled[node]
        filled[node] += 1
        # Clockwise: right along the upper row, back along the lower one. The first node
        # begins in its lower row, so that a ring in rank order crosses between
        # neighbors.
        turn = seat if node else (seat + columns) % ranks_per_node
        upper = turn < columns
        column = turn if upper else ranks_per_node - 1 - turn
        left = node * (columns + 1.6) + 0.85
        places.append((left + column, 1.7 if upper else 0.65))
    return places
