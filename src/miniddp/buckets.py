"""Which parameter goes into which bucket: pure functions of sizes, without communication.

Many small messages pay the link's latency once each; one large message cannot start before the last
gradient is ready. Buckets of a few MiB lie between the two. A *plan* is a list of buckets in launch
order, each a list of parameter indices: `initial_plan` before any backward, `arrival_plan` after
one. Source: `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

MIB = 1024 * 1024
DEFAULT_CAP_MB = 25
FIRST_CAP_BYTES = 1 * MIB
NO_CAP: tuple[int, ...] = (2**63 - 1,)

Plan = list[list[int]]


class ParameterSize(NamedTuple):
    """A parameter's size and kind; only parameters of one `kind` may share a bucket."""

    nbytes: int
    kind: Hashable


def sizes_of(parameters: Iterable[torch.Tensor]) -> list[ParameterSize]:
    """The sizes of `parameters`, in their order; their kind is their dtype and device."""
    return [ParameterSize(p.nbytes, (p.dtype, p.device)) for p in parameters]


def bucket_caps(caps_mb: float | Sequence[float] | None = None) -> tuple[int, ...]:
    """The caps in bytes, one per bucket; the last applies to all later buckets.

    `caps_mb` is one cap in MiB, or one per bucket. Raises ValueError unless all are finite numbers
    and ≥ 0.
    """
    if caps_mb is None:
        return (FIRST_CAP_BYTES, DEFAULT_CAP_MB * MIB)
    caps: list[Any] = list(caps_mb) if isinstance(caps_mb, Sequence) else [caps_mb]
    numbers = len(caps) > 0 and all(isinstance(cap, Real) for cap in caps)
    if not numbers or not all(0 <= cap < math.inf for cap in caps):
        raise ValueError(
            "bucket caps are sizes in MiB, as numbers: at least one, none of them negative, "
            f"infinite, or NaN, but got {caps}; 0 puts every parameter into a bucket of its own"
        )
    return tuple(int(cap * MIB) for cap in caps)


def initial_plan(sizes: Sequence[ParameterSize], caps: Sequence[int] = NO_CAP) -> Plan:
    """Pack in definition order, then reverse: the last parameters' gradients arrive first.

    With `NO_CAP`, one bucket per kind: the safe choice while the order of arrival is unknown.
    """
    return sorted(_pack(sizes, range(len(sizes)), caps), key=min, reverse=True)


def arrival_plan(sizes: Sequence[ParameterSize], order: Sequence[int], caps: Sequence[int]) -> Plan:
    """The plan for parameters in `order`, in which their gradients arrived.

    Buckets are sorted by the arrival of their last gradient, which completes them. torch fills the
    same buckets, but appends those below their cap in the order of a hash table. Raises ValueError
    if `order` is not a permutation of the parameters' indices.
    """
    if sorted(order) != list(range(len(sizes))):
        raise ValueError(f"order {list(order)} must name each of the {len(sizes)} parameters once")
    arrival = {index: moment for moment, index in enumerate(order)}
    return sorted(_pack(sizes, order, caps), key=lambda bucket: arrival[bucket[-1]])


def _pack(sizes: Sequence[ParameterSize], order: Iterable[int], caps: Sequence[int]) -> Plan:
    """Fill one open bucket per kind, in `order`; close it once its size reaches its cap.

    A bucket exceeds its cap by at most the size of its last parameter. Caps are counted per kind:
    by default, the first float32 bucket and the first bfloat16 bucket are both small.
    """
    closed: Plan = []
    open_bucket: dict[Hashable, list[int]] = defaultdict(list)
    open_bytes: dict[Hashable, int] = defaultdict(int)
    filled: dict[Hashable, int] = defaultdict(int)
    for index in order:
        nbytes, kind = sizes[index]
        open_bucket[kind].append(index)
        open_bytes[kind] += nbytes
        if open_bytes[kind] >= caps[min(filled[kind], len(caps) - 1)]:
            closed.append(open_bucket.pop(kind))
            open_bytes[kind] = 0
            filled[kind] += 1
    return closed + list(open_bucket.values())
