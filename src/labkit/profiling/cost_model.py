"""The cost of a collective and the time of a step, on other links and with more ranks.

    link = Link.of(gbit_per_s=10, latency_us=20)
    step = simulate(backward_of(recording), plan, lambda n: link.seconds(ring(1024, n)))

1. *The α–β model.* A message of n bytes takes α + n·β seconds: α is the latency of the link, 1/β
   its bandwidth. A `Cost` has the number of messages of an all-reduce that wait for one another,
   and their total length.
2. *Simulating a step* from a recorded backward (`labkit.profiling.recording`), a bucket plan, and
   the cost of an all-reduce. Buckets are launched in order; the link carries one at a time.

The models assume an otherwise idle network that is the same between any two ranks. In a cluster,
nodes share links, and a step waits for its slowest rank.

Sources: Hockney, "The communication challenge for MPP" (1994) for α + n·β; Thakur, Rabenseifner
and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005) for the
algorithms; Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations" (2009) for the bound.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from labkit.profiling.recording import RankRecording, Recording

MIB = 2**20


# 1. The α–β model ---------------------------------------------------------------------------------


class Cost(NamedTuple):
    """The cost of one all-reduce, independent of the link."""

    steps: int  # messages sent one after another
    bytes: float  # their total length
    sent: float  # by the busiest rank


def least_bytes(world_size: int, nbytes: float) -> float:
    """The least that the busiest rank sends in any all-reduce of `nbytes`: 2(W−1)/W of them.

    Other ranks may send less. The bound assumes that only ranks add; with switches that add in the
    network (SHARP), every rank sends `nbytes`.
    """
    return 2 * (world_size - 1) / world_size * nbytes


def naive(world_size: int, nbytes: float) -> Cost:
    """All ranks send to rank 0, one after another, and it sends the sum back: 2(W−1) messages."""
    others = world_size - 1
    return Cost(2 * others, 2 * others * nbytes, others * nbytes)


def ring(world_size: int, nbytes: float) -> Cost:
    """Chunks of n/W bytes go around a ring twice: 2(W−1) steps. Every rank sends `least_bytes`."""
    sent = least_bytes(world_size, nbytes)
    return Cost(2 * (world_size - 1), sent, sent)


def recursive_doubling(world_size: int, nbytes: float) -> Cost:
    """Pairs exchange everything, then pairs of pairs: log₂W steps of n bytes.

    If W is not a power of two, the ranks beyond the next lower power of two take two more steps.
    """
    doublings = world_size.bit_length() - 1
    if world_size == 2**doublings:
        return Cost(doublings, doublings * nbytes, doublings * nbytes)
    return Cost(doublings + 2, (doublings + 2) * nbytes, (doublings + 1) * nbytes)


def tree(world_size: int, nbytes: float) -> Cost:
    """Two binary trees at once: half of the bytes go up and down each tree, in many small pieces.

    This is a lower bound: ⌈log₂W⌉ steps up, as many down, and every byte crosses a rank's link
    twice. Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan" (2009).
    """
    depth = (world_size - 1).bit_length()
    return Cost(2 * depth, 2 * nbytes if depth else 0, 2 * nbytes if depth else 0)


ALGORITHMS: dict[str, Callable[[int, float], Cost]] = {
    "naive": naive,
    "ring": ring,
    "recursive doubling": recursive_doubling,
}


class Link(NamedTuple):
    """A link: α in seconds per step, and β in seconds per byte."""

    latency: float
    seconds_per_byte: float

    @classmethod
    def of(cls, gbit_per_s: float, latency_us: float) -> Self:
        """A link by its bandwidth in 10⁹ bit/s and its latency in microseconds."""
        if not gbit_per_s > 0 or not latency_us >= 0:
            raise ValueError(
                f"gbit_per_s={gbit_per_s}, latency_us={latency_us}: a link needs a positive rate "
                "and a latency of 0 or more"
            )
        return cls(latency_us * 1e-6, 8e-9 / gbit_per_s)

    def seconds(self, cost: Cost) -> float:
        """α for each step and β for each byte of `cost`."""
        return cost.steps * self.latency + cost.bytes * self.seconds_per_byte


# 2. Simulating a step -----------------------------------------------------------------------------


class Backward(NamedTuple):
    """The computing half of a step: when each gradient is ready if nothing ever waits.

    Seconds count from the start of the forward. `ready[i]` and `bytes[i]` describe the i-th
    gradient to arrive; `end` is the time of the last one.
    """

    ready: tuple[float, ...]
    bytes: tuple[int, ...]

    @property
    def end(self) -> float:
        return self.ready[-1]


def backward_of(recording: Recording | RankRecording) -> Backward:
    """The computing half of a recorded step; of several ranks, the slowest one's per gradient.

    Record a step without collectives during backward (the rung `Flat`); otherwise their work
    is already part of these times.

    Raises ValueError for a recording without gradients, or if the ranks' orders differ.
    """
    ranks = recording.ranks if isinstance(recording, Recording) else (recording,)
    orders = {tuple((g.parameter, g.bytes) for g in one.gradients) for one in ranks}
    if len(orders) != 1 or not all(orders):
        raise ValueError(
            "a backward is simulated from gradients that arrive in the same order on every rank; "
            f"found {len(orders)} order(s) of {sorted({len(order) for order in orders})} gradients"
        )
    ready = zip(*([g.ready - one.begin for g in one.gradients] for one in ranks), strict=True)
    return Backward(tuple(map(max, ready)), tuple(g.bytes for g in ranks[0].gradients))


class SimulatedStep(NamedTuple):
    """A simulated step, in seconds since its start.

    `sent[k]` is (launched, begun, done) of bucket k: from `launched` to `begun` it waits for the
    link. `compute_end` is when the last gradient is ready, and `end` is when all are averaged.
    """

    sent: tuple[tuple[float, float, float], ...]
    compute_end: float
    end: float

    @property
    def exposed(self) -> float:
        """The seconds from the last gradient to the end of the step."""
        return self.end - self.compute_end


def simulate(
    backward: Backward,
    plan: Sequence[Sequence[int]],
    all_reduce: Callable[[int], float],
    overlap: bool = True,
) -> SimulatedStep:
    """The time of a step with the buckets of `plan`.

    Args:
        backward: the computing half of the step, of this model on this machine.
        plan: the buckets in launch order; each lists its gradients' positions in the order of
            arrival, as `miniddp.buckets.arrival_plan(sizes, range(n), caps)` returns them.
        all_reduce: the seconds for a number of bytes, such as
            `lambda n: link.seconds(ring(1024, n))`.
        overlap: False launches everything after backward has ended.

    Raises ValueError unless the plan holds every gradient exactly once.
    """
    places = sorted(index for bucket in plan for index in bucket)
    if places != list(range(len(backward.ready))):
        raise ValueError(
            f"the plan holds {len(places)} gradient(s) of {len(backward.ready)}, or one twice; "
            "it has to name each place in the order of arrival once"
        )
    sent, launched, free = [], 0.0, 0.0
    for bucket in plan:
        full = backward.ready[max(bucket)] if overlap else backward.end
        launched = max(launched, full)
        begun = max(launched, free)
        free = begun + all_reduce(sum(backward.bytes[index] for index in bucket))
        sent.append((launched, begun, free))
    return SimulatedStep(tuple(sent), backward.end, max(backward.end, free))
