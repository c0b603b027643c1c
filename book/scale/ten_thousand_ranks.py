"""For ten_thousand_ranks.ipynb: a made-up job on 8 to 16,384 ranks, simulated. The
batch of a step is fixed, the ranks are not.

    seconds = step_seconds(1024, "flat ring", plan)
    waiting = 1 - compute(1024).end / seconds

Nothing here is measured. The model has 350 million float32 parameters in 96 equal
gradients. A sample takes 12.5 ms in forward and 25 ms in backward. Four ranks of a node
share one network card.
"""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from labkit.book import figures
from labkit.profiling.cost_model import Backward, Link, ring, simulate, tree
from labkit.profiling.sweeps import backward_like

RANKS_PER_NODE = 4
BATCH = 16_384  # samples per step
FORWARD, BACKWARD = 0.0125, 0.025  # seconds per sample
GRADIENTS = [350_000_000 * 4 // 96] * 96  # bytes, in order of arrival
INSIDE = Link.of(gbit_per_s=1200, latency_us=3)
ACROSS = Link.of(gbit_per_s=400, latency_us=10)


def _flat_ring(world_size: int, nbytes: int) -> float:
    # A chunk travels all links in turn. One in RANKS_PER_NODE leads to another node, so
    # the mean latency counts; the slowest link sets the bandwidth.
    inside = INSIDE.latency * (RANKS_PER_NODE - 1)
    mean = Link((inside + ACROSS.latency) / RANKS_PER_NODE, ACROSS.seconds_per_byte)
    return mean.seconds(ring(world_size, nbytes))


def _tree(world_size: int, nbytes: int) -> float:
    return ACROSS.seconds(tree(world_size, nbytes))


def _hierarchical(world_size: int, nbytes: int) -> float:
    # A ring in each node, then rings across: the ranks of a node share its link, and
    # send together what one ring over the nodes would send.
    across = ACROSS.seconds(ring(world_size // RANKS_PER_NODE, nbytes))
    return INSIDE.seconds(ring(RANKS_PER_NODE, nbytes)) + across


ALL_REDUCES: dict[str, Callable[[int, int], float]] = {
    "flat ring": _flat_ring,
    "hierarchical": _hierarchical,
    "tree": _tree,
}


def compute(world_size: int, batch: int = BATCH) -> Backward:
    """What one of `world_size` ranks computes in a step of `batch` samples."""
    samples = batch / world_size
    return backward_like(GRADIENTS, samples * FORWARD, samples * BACKWARD)


def step_seconds(
    world_size: int,
    all_reduce: str,
    plan: Sequence[Sequence[int]],
    batch: int = BATCH,
    overlap: bool = True,
) -> float:
    """Simulated seconds of one step.

    Args:
        world_size: a multiple of `RANKS_PER_NODE`.
        all_reduce: a name of `ALL_REDUCES`.
        plan: the buckets of `GRADIENTS`, as `miniddp.buckets.arrival_plan` returns.
        batch: samples per step, of all ranks together.
        overlap: False launches all buckets after backward.

    Raises ValueError if the ranks do not fill whole nodes.
    """
    if world_size < RANKS_PER_NODE or world_size % RANKS_PER_NODE:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {RANKS_PER_NODE}: take a multiple"
        )
    cost = ALL_REDUCES[all_reduce]
    step = simulate(
        compute(world_size, batch),
        plan,
        lambda nbytes: cost(world_size, nbytes),
        overlap=overlap,
    )
    return step.end


def drawn(
    worlds: Sequence[int],
    seconds: Mapping[str, Sequence[float]],
    computing: Sequence[float],
) -> Figure:
    """Seconds per step against the number of ranks, a line per all-reduce."""
    figures.use()
    figure, axes = plt.subplots()
    for color, (way, times) in zip(figures.RANKS, seconds.items(), strict=False):
        axes.plot(worlds, times, "o-", color=color, ms=4, label=way)
    label = "computing alone"
    axes.plot(worlds, computing, "--", color=figures.TRUTH, label=label)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds per step")
    axes.set_title("Simulated: one job on more and more ranks")
    axes.legend()
    return figure
