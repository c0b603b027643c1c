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

    `step` is what `simulate` returned for `backward` and `plan`; of its seconds, `forward`
    belong to the forward pass.
    """
    gradients = tuple(
        Gradient(str(place), *gradient)
        for place, gradient in enumerate(zip(backward.bytes, backward.ready, strict=True))
    )
    collectives = []
    for number, (bucket, (launched, _, done)) in enumerate(zip(plan, step.sent, strict=True)):
        nbytes = sum(backward.bytes[place] for place in bucket)
        ready = sum(moment <= launched for moment in backward.ready)
        collectives.append(Collective("all_reduce", nbytes, ready, number, launched, done))
    rank = RankRecording(0, 0.0, step.end, ((0.0, forward),), gradients, tuple(collectives))
    return Recording((rank,))
