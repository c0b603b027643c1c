"""A bucket plan from measurements: pure functions of sizes, ready times, and the cost of the link.

`measured_plan` chooses bucket sizes from two things: when each gradient is ready, and what an
all-reduce costs on this link. The last bucket is then averaged as early as the model allows.

Cost: O(parameters × buckets), once per training run.
Source: merging gradients by dynamic programming over such a model is due to Shi, Chu, and Li,
"MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import inf
from statistics import fmean, median
from typing import NamedTuple

from miniddp.buckets import ParameterSize, Plan, arrival_plan

WORTH_IT = 0.02
PARTS = (1, 2, 4, 8, 16, 32, 64)


class LinkCost(NamedTuple):
    """What an all-reduce of n bytes takes while backward goes on, in seconds.

    It occupies the link for `latency` + n·`per_byte`, and the processor, which backward then does
    without, for `cpu` + n·`cpu_per_byte` of these: no more than the former, and 0 where a network
    card does the work. To copy a bucket's averages out takes n·`copy_per_byte` more, which the
    link's work on later buckets hides, but not for the last one.
    """

    latency: float
    per_byte: float
    cpu: float = 0.0
    cpu_per_byte: float = 0.0
    copy_per_byte: float = 0.0


def measured_plan(
    sizes: Sequence[ParameterSize],
    steps: Sequence[Sequence[float]],
    link: LinkCost,
    caps: Sequence[int],
) -> Plan:
    """The plan that would have ended first in the measured `steps`, on average.

    `steps[s][i]` is when gradient i was ready in step s, in seconds since that step began. The
    candidates are `fastest_plan` for the medians of these, with buckets of any length and with ever
    shorter ones: these cost a little more latency, and lose less in a step whose gradients come
    sooner or later than in the median, and less while the last one is copied out. How much that
    matters is seen by trying them on the steps.

    Where none promises to be at least 2 % sooner than `arrival_plan` with `caps`, it is the latter:
    noise and the model's own error can undo less.

    Raises:
        ValueError: no step, or one with another number of times than there are parameters.
    """
    if not steps or any(len(step) != len(sizes) for step in steps):
        raise ValueError(
            f"{[len(step) for step in steps]} ready times in {len(steps)} steps; give at least one "
            f"step, and one time for each of the {len(sizes)} parameters"
        )
    ready = [median(times) for times in zip(*steps, strict=True)]
    order = sorted(range(len(sizes)), key=ready.__getitem__)
    total = sum(size.nbytes for size in sizes)
    candidates = [fastest_plan(sizes, ready, link, total / parts) for parts in PARTS]

    def seconds(plan: Plan) -> float:
        last = sum(sizes[index].nbytes for bucket in plan[-1:] for index in bucket)
        averaged = fmean(finish_time(plan, sizes, step, link) for step in steps)
        return averaged + last * link.copy_per_byte

    best, usual = min(candidates, key=seconds), arrival_plan(sizes, order, caps)
    return best if seconds(best) <= (1 - WORTH_IT) * seconds(usual) else usual


def finish_time(
    plan: Plan, sizes: Sequence[ParameterSize], ready: Sequence[float], link: LinkCost
) -> float:
    """When the last bucket of `plan` is averaged, in the seconds of `ready`.

    The model: buckets are launched in order, each once its last gradient is ready; the link carries
    one at a time; and what earlier buckets took from the processor makes every gradient later.
    """
    full, taken, done = 0.0, 0.0, 0.0
    for bucket in plan:
        nbytes = sum(sizes[index].nbytes for index in bucket)
        full = max(full, *(ready[index] for index in bucket))
        done = max(done, full + taken) + link.latency + nbytes * link.per_byte
        taken += link.cpu + nbytes * link.cpu_per_byte
    return done


def fastest_plan(
    sizes: Sequence[ParameterSize],
    ready: Sequence[float],
    link: LinkCost,
    longest: float = inf,
) -> Plan:
    """The plan with the least `finish_time`, of fewest buckets, among runs of the arrival order.

    A bucket that has `longest` bytes takes no further parameter.

    If there are several kinds, the cuts are those that would be best if all could travel together,
    and what lies between two of them is sent as one bucket for each kind.

    Dynamic programming over (how many buckets, how many gradients). The last bucket of j gradients
    begins after i of them, and only two values of i can be best: the largest for which the link is
    free again when gradient j is ready, since a smaller one only makes the bucket longer; and the
    next, since a larger one only adds to what the link has to carry after it. (If these make it too
    long: the first that does not.) All grow with j, so the whole costs O(buckets · parameters).

    Raises:
        ValueError: `ready` is not one time for each parameter.
    """
    if len(ready) != len(sizes):
        raise ValueError(f"{len(ready)} ready times for {len(sizes)} parameters: one each")
    order = sorted(range(len(sizes)), key=ready.__getitem__)
    if not order:
        return []
    times = [ready[index] for index in order]
    before = list(accumulate((sizes[index].nbytes for index in order), initial=0))

    # done[j]: when the first j gradients are averaged, at the earliest, in at most `count` buckets.
    done = [-inf] + [inf] * len(order)
    begins: list[list[int]] = []  # [count - 1][j]: where the last bucket then begins; j: nowhere
    for count in range(1, len(order) + 1):
        spent = (count - 1) * link.cpu
        # Whatever the cuts: all bytes have to pass the link, and the last gradient comes last.
        all_bytes = times[0] + count * link.latency + before[-1] * link.per_byte
        last_alone = times[-1] + spent + link.latency + before[-2] * link.cpu_per_byte
        last_alone += (before[-1] - before[-2]) * link.per_byte
        if max(all_bytes, last_alone) >= done[-1]:
            break
        sooner, begin, free, fits = [-inf], [0], 0, 0
        for j in range(1, len(order) + 1):
            full = times[j - 1] + spent
            while fits + 1 < j and before[j - 1] - before[fits] >= longest:
                fits += 1
            while free + 1 < j and done[free + 1] <= full + before[free + 1] * link.cpu_per_byte:
                free += 1
            best, cut = done[j], j
            first = max(free, fits)
            for i in range(first, min(first + 2, j)):
                start = max(done[i], full + before[i] * link.cpu_per_byte)
                end = start + link.latency + (before[j] - before[i]) * link.per_byte
                if end < best:
                    best, cut = end, i
            sooner.append(best)
            begin.append(cut)
        done = sooner
        begins.append(begin)

    runs, end = [], len(order)
    for begin in reversed(begins):
        if begin[end] < end:
            runs.append(order[begin[end] : end])
        end = begin[end]
    arrival = {index: moment for moment, index in enumerate(order)}
    split = [bucket for run in reversed(runs) for bucket in _of_one_kind(run, sizes)]
    return sorted(split, key=lambda bucket: arrival[bucket[-1]])


def _of_one_kind(run: Sequence[int], sizes: Sequence[ParameterSize]) -> Plan:
    buckets: dict[Hashable, list[int]] = defaultdict(list)
    for index in run:
        buckets[sizes[index].kind].append(index)
    return list(buckets.values())
