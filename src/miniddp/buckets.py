"""Which parameter lies in which bucket: pure functions, no communication.

A bucket is a run of parameters whose gradients travel in one all-reduce. Many small messages pay
the latency of the link once each; one large message cannot start before the last gradient is
ready. Buckets of a few MiB lie between the two. Everything here is arithmetic on sizes, so that
every rank, given the same sizes and the same order, finds the same answer without a word being
exchanged.

A *plan* is a list of buckets in launch order, each a list of parameter indices. Three plans matter:

1. `initial_plan`: before any backward pass has been seen. Parameters are packed in the order in
   which the module defines them, and the buckets are launched in reverse, since gradients appear
   from the last layer to the first.
2. `arrival_plan`: after one backward pass. Parameters are packed in the order in which their
   gradients arrived, with a small first bucket, so that communication starts early.
3. `measured_plan`: after some steps on the clock. The sizes follow from when each gradient is ready
   and what an all-reduce costs on this link, such that the last one is done as early as can be.

Cost: O(number of parameters), a few times in a training run; for the third plan, that times the
number of its buckets.

The rules of the first two are those of `compute_bucket_assignment_by_size` in
torch/csrc/distributed/c10d/reducer.cpp and of Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020, §4.2. Merging gradients by dynamic programming over
such a model: Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous
SGD Algorithms", INFOCOM 2019.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from math import inf
from statistics import fmean, median
from typing import NamedTuple

import torch

MIB = 1024 * 1024
DEFAULT_CAP_MB = 25
FIRST_CAP_BYTES = 1 * MIB
NO_CAP: tuple[int, ...] = (2**63 - 1,)
WORTH_IT = 0.02
PARTS = (1, 2, 4, 8, 16, 32, 64)

Plan = list[list[int]]


class ParameterSize(NamedTuple):
    """What packing needs to know of one parameter.

    `kind` says with which others it may share a bucket (its dtype and device); a `sparse` one,
    whose gradient is a sparse tensor, always travels alone.
    """

    nbytes: int
    kind: Hashable
    sparse: bool = False


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


def sizes_of(
    parameters: Iterable[torch.Tensor], sparse: Iterable[bool] | None = None
) -> list[ParameterSize]:
    """The sizes of `parameters`, in their order; `sparse[i]` marks one with a sparse gradient."""
    parameters = list(parameters)
    flags = [False] * len(parameters) if sparse is None else list(sparse)
    return [
        ParameterSize(p.numel() * p.element_size(), (p.dtype, p.device), flag)
        for p, flag in zip(parameters, flags, strict=True)
    ]


def bucket_caps(
    bucket_cap_mb: float | None = None, bucket_cap_mb_list: Sequence[float] | None = None
) -> tuple[int, ...]:
    """The caps in bytes, one a bucket, of which the last holds for all further buckets.

    By default a first bucket of 1 MiB and then 25 MiB. An explicit `bucket_cap_mb` (in MiB) is the
    first bucket's cap too; `bucket_cap_mb_list` gives one cap a bucket and wins over it.

    Raises:
        ValueError: a cap is negative or not a number.
    """
    if bucket_cap_mb_list:
        caps = list(bucket_cap_mb_list)
    elif bucket_cap_mb is not None:
        caps = [bucket_cap_mb]
    else:
        return (FIRST_CAP_BYTES, DEFAULT_CAP_MB * MIB)
    if not all(cap >= 0 for cap in caps):
        raise ValueError(
            f"bucket caps are sizes in MiB and cannot be negative or NaN, but got {caps}; "
            "0 puts every parameter into a bucket of its own"
        )
    return tuple(int(cap * MIB) for cap in caps)


def initial_plan(sizes: Sequence[ParameterSize], caps: Sequence[int] = NO_CAP) -> Plan:
    """The plan for parameters in definition order, launched last bucket first.

    With `NO_CAP` there is one bucket for each kind (and for each sparse parameter): the careful
    choice as long as the true order of the gradients is unknown.
    """
    buckets = _pack(sizes, range(len(sizes)), caps)
    return sorted(buckets, key=min, reverse=True)


def arrival_plan(sizes: Sequence[ParameterSize], order: Sequence[int], caps: Sequence[int]) -> Plan:
    """The plan for parameters in `order`, the order in which their gradients arrived.

    A bucket can be launched once its last gradient is there, so buckets are sorted by that moment.

    Raises:
        ValueError: `order` is not a permutation of the parameters' indices.
    """
    if sorted(order) != list(range(len(sizes))):
        raise ValueError(
            f"the order of arrival must name each of the {len(sizes)} parameters once, "
            f"but got {list(order)}"
        )
    arrival = {index: moment for moment, index in enumerate(order)}
    return sorted(_pack(sizes, order, caps), key=lambda bucket: arrival[bucket[-1]])


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
    and what lies between two of them is sent as one bucket for each kind (and sparse parameter).

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
        _, kind, sparse = sizes[index]
        buckets[index if sparse else (kind,)].append(index)
    return list(buckets.values())


def _pack(sizes: Sequence[ParameterSize], order: Iterable[int], caps: Sequence[int]) -> Plan:
    """Fill one open bucket for each kind, in `order`; close it once its size reaches its cap.

    A bucket may thus exceed its cap by less than its last parameter. The caps are counted for each
    kind on its own: the first float32 bucket and the first bfloat16 bucket are both small.
    """
    closed: Plan = []
    open_bucket: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    filled: dict[Hashable, int] = {}
    for index in order:
        nbytes, kind, sparse = sizes[index]
        if sparse:
            closed.append([index])
            continue
        open_bucket.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes.get(kind, 0) + nbytes
        cap = caps[min(filled.get(kind, 0), len(caps) - 1)]
        if open_bytes[kind] >= cap:
            closed.append(open_bucket.pop(kind))
            open_bytes[kind] = 0
            filled[kind] = filled.get(kind, 0) + 1
    return closed + list(open_bucket.values())
