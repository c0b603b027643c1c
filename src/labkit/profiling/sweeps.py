"""Simulated steps of a model that nobody has timed: for sweeps over bucket sizes and networks."""

from collections.abc import Sequence
from itertools import accumulate

from labkit.profiling.cost_model import Backward, Link, SimulatedStep, ring, simulate


def backward_like(sizes: Sequence[int], forward: float, backward: float) -> Backward:
    """A backward in which each gradient takes its share of the time, in proportion to its size.

    Args:
        sizes: bytes of each gradient, in order of arrival.
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
    """
    total = sum(sizes)
    done = accumulate(sizes)
    return Backward(tuple(forward + backward * n / total for n in done), tuple(sizes))


def simulate_ring(
    backward: Backward,
    plan: Sequence[Sequence[int]],
    link: Link,
    world_size: int,
    overlap: bool = True,
) -> SimulatedStep:
    """One step over `link`, whose buckets are all-reduced by a ring of `world_size` ranks."""
    return simulate(
        backward, plan, lambda nbytes: link.seconds(ring(world_size, nbytes)), overlap=overlap
    )


def limit_of_ring(backward: Backward, link: Link, world_size: int) -> float:
    """The seconds below which no plan gets over `link`: max(compute, t₁ + C).

    t₁ is when the first gradient is ready, and C is one all-reduce of all bytes.
    """
    one_message = link.seconds(ring(world_size, sum(backward.bytes)))
    return max(backward.end, backward.ready[0] + one_message)
