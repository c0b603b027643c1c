"""A bucket plan from measurements: pure functions of sizes, ready times, and the cost of the link.

`fastest_plan` chooses bucket sizes from two things: when each gradient is ready, and what an
all-reduce costs on this link. The last bucket is then averaged as early as the model allows. The
drop-in and torch's DDP accept such sizes as `bucket_cap_mb_list`.

Cost: O(parameters × buckets), once per training run.
Source: merging gradients by dynamic programming over such a model is due to Shi, Chu, and Li,
"MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from miniddp.buckets import ParameterSize, Plan


class LinkCost(NamedTuple):
    """The cost of an all-reduce of n bytes during backward, in seconds.

    It occupies the link for `latency` + n·`per_byte`. For `cpu` + n·`cpu_per_byte` of this time it
    also takes the processor away from backward (0 if a network card does the work).
    """

    latency: float
    per_byte: float
    cpu: float = 0.0
    cpu_per_byte: float = 0.0


def finish_time(
    plan: Plan, sizes: Sequence[ParameterSize], ready: Sequence[float], link: LinkCost
) -> float:
    """When the last bucket of `plan` is averaged, in seconds on the clock of `ready`.

    The model: buckets are launched in order, each once its last gradient is ready. The link carries
    one at a time. The processor time of earlier buckets delays every later gradient.
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
    """The plan with the least `finish_time`, and of these the one with the fewest buckets.

    A bucket is a contiguous run of the arrival order. Once it has `longest` bytes, it takes no
    further parameter. If there are several dtypes or devices, the cuts are placed as if all could
    share a bucket. Each run is then sent as one bucket per kind.

    Dynamic programming over (number of buckets, number of gradients), in O(buckets · parameters).

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
        full = [time + spent for time in times]
        done, begin = _one_bucket_more(done, full, before, link, longest)
        begins.append(begin)

    return _cut(order, begins, sizes)


def _one_bucket_more(
    done: Sequence[float],
    full: Sequence[float],
    before: Sequence[float],
    link: LinkCost,
    longest: float,
) -> tuple[list[float], list[int]]:
    """The next `done`, and where the last bucket of the first j gradients then begins.

    Let it begin after gradient i. Only two values of i can be best: the largest for which the link
    is free again when gradient j is ready, and the next one. A smaller i only makes the bucket
    longer. A larger i does not end earlier, because the link is busy all the time. (If the bucket
    would then be too long: the first i that makes it short enough.) All of these grow with j.
    """
    sooner, begin, free, fits = [-inf], [0], 0, 0
    for j in range(1, len(done)):
        while fits + 1 < j and before[j - 1] - before[fits] >= longest:
            fits += 1
        while free + 1 < j and done[free + 1] <= full[j - 1] + before[free + 1] * link.cpu_per_byte:
            free += 1
        best, cut = done[j], j
        first = max(free, fits)
        for i in range(first, min(first + 2, j)):
            start = max(done[i], full[j - 1] + before[i] * link.cpu_per_byte)
            end = start + link.latency + (before[j] - before[i]) * link.per_byte
            if end < best:
                best, cut = end, i
        sooner.append(best)
        begin.append(cut)
    return sooner, begin


def _cut(
    order: Sequence[int], begins: Sequence[Sequence[int]], sizes: Sequence[ParameterSize]
) -> Plan:
    """`order` cut where the buckets begin, found by reading the tables of `fastest_plan` back."""
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
