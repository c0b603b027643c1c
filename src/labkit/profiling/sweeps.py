"""Simulated steps of a model that nobody has timed: for sweeps over bucket sizes and networks."""

from collections.abc import Sequence
from itertools import accumulate

from labkit.profiling.cost_model import (
    Backward,
    Link,
    SimulatedStep,
    lower_limit,
    ring,
    simulate,
)
from labkit.profiling.recording import Collective, Gradient, RankRecording, Recording


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
    """The seconds below which no plan gets over `link`: see `cost_model.lower_limit`."""
    return lower_limit(backward, lambda nbytes: link.seconds(ring(world_size, nbytes)))


def as_recording(
    step: SimulatedStep, backward: Backward, plan: Sequence[Sequence[int]], forward: float
) -> Recording:
    """A simulated step in the form of a recorded one, which `timeline.draw_together` can draw.

    Args:
        step: what `simulate` returned for `backward` and `plan`, with a `cpu_share` of 0.
        backward: in which `forward` seconds belong to the forward pass.
        plan: the buckets of `step`.
        forward: seconds.
    """
    sizes_and_moments = zip(backward.bytes, backward.ready, strict=True)
    gradients = tuple(
        Gradient(str(place), nbytes, moment)
        for place, (nbytes, moment) in enumerate(sizes_and_moments)
    )
    collectives = tuple(
        Collective(
            "all_reduce",
            sum(backward.bytes[place] for place in bucket),
            sum(moment <= launched for moment in backward.ready),
            number,
            launched,
            done,
        )
        for number, (bucket, (launched, _, done)) in enumerate(zip(plan, step.sent, strict=True))
    )
    rank = RankRecording(0, 0.0, step.end, ((0.0, forward),), gradients, collectives)
    return Recording((rank,))
