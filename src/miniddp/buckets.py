"""Which parameter goes into which bucket: pure functions of sizes, without communication.

A bucket is a list of parameters whose gradients travel in one all-reduce. Many small messages pay
the link's latency once each. One large message cannot start before the last gradient is ready.
Buckets of a few MiB lie between the two. Every rank computes the same plan from the same sizes and
the same order, so nothing has to be exchanged.

A *plan* is a list of buckets in launch order, each a list of parameter indices:

1. `initial_plan`, before any backward: parameters are packed in the order in which the module
   defines them and launched in reverse, because gradients appear from the last layer to the first.
2. `arrival_plan`, after one backward: parameters are packed in the order in which their gradients
   arrived, with a small first bucket so that communication starts early.

Cost: O(number of parameters), twice in a training run.
Source: `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp; Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 4.2.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

MIB = 1024 * 1024
DEFAULT_CAP_MB = 25
FIRST_CAP_BYTES = 1 * MIB
NO_CAP: tuple[int, ...] = (2**63 - 1,)

Plan = list[list[int]]


class ParameterSize(NamedTuple):
    """What packing needs to know of one parameter.

    `kind` says with which others it may share a bucket (its dtype and device); a `sparse` one,
    whose gradient is a sparse tensor, always travels alone.
    """

    nbytes: int
    kind: Hashable
    sparse: bool = False


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
