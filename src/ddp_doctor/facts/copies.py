"""Which ranks hold copies of a parameter, and which ranks compute the same part of the loss.

In plain data parallelism every rank holds a copy of everything and has samples of its own. Where
tensors, experts, or stages are split over ranks, a gradient must be combined over the copies of its
parameter only. Samples that several ranks share are counted once.

Plain data, no torch. A group is a list of ranks; groups of one thing are disjoint.
"""

import math
from collections.abc import Iterable
from typing import Any

from ddp_doctor.facts.types import Groups, StartFact, WindowFact


def copies_of(
    starts: dict[int, StartFact], windows: list[dict[int, WindowFact]]
) -> dict[str, Groups]:
    """For each parameter, the groups of ranks that hold copies of it.

    `starts` and each of `windows` have one fact per rank: what it held before its first step, and
    the records of one step. Ranks have copies if they start with the same bits of the same shard,
    or step with the same gradient. Bits of a constant (zeros, ones) tell nothing: ranks that hold
    the same constant count as copies if no other parameter tells them apart.
    """
    found: dict[str, Groups] = {}
    unclear = []
    for name in dict.fromkeys(name for start in starts.values() for name in start["parameters"]):
        held = {rank: _held(start, name) for rank, start in starts.items()}
        pairs = [pair for window in windows for pair in _same_gradient(name, window, starts)]
        if all("constant" in what for what in held.values()):
            unclear.append((name, pairs))
            continue
        alike = _alike({rank: str(what) for rank, what in held.items() if what})
        found[name] = joined(starts, [*alike, *pairs])
    finest = _refined(list(found.values()), list(starts))
    found |= {name: joined(starts, [*_chained(finest), *pairs]) for name, pairs in unclear}
    return found


def joined(ranks: Iterable[int], pairs: Iterable[tuple[int, int]]) -> Groups:
    """The groups in which `pairs` put `ranks`."""
    group = {rank: [rank] for rank in ranks}
    for one, other in pairs:
        if group[one] is not group[other]:
            group[one] += group[other]
            for rank in group[other]:
                group[rank] = group[one]
    unique = {id(members): sorted(members) for members in group.values()}
    return sorted(unique.values())


def _held(start: StartFact, name: str) -> list[Any]:
    """What a rank holds of a parameter: its shard and a hash; empty if that is nothing."""
    shard = start["shards"].get(name)
    if name in start["constant"]:
        return ["constant"] if shard is None else ["shard", shard]
    bits = start["parameters"].get(name)
    return [shard, bits] if bits else []


def _same_gradient(
    name: str, window: dict[int, WindowFact], starts: dict[int, StartFact]
) -> list[tuple[int, int]]:
    """Pairs of ranks with the same bits in a gradient that is not 0."""
    seen = {}
    for rank, fact in window.items():
        snapshot = fact["snapshot"]
        value = snapshot["grads"].get(name)
        if value and math.isfinite(value) and rank in starts:
            shard = starts[rank]["shards"].get(name)
            seen[rank] = str([shard, snapshot["hashes"].get(name)])
    return _alike(seen)


def _alike(keys: dict[int, str]) -> list[tuple[int, int]]:
    first: dict[str, int] = {}
    return [(first.setdefault(key, rank), rank) for rank, key in keys.items()]


def _chained(groups: Groups) -> list[tuple[int, int]]:
    return [(group[0], rank) for group in groups for rank in group]


def _refined(partitions: list[Groups], ranks: list[int]) -> Groups:
    """The ranks that are together in every partition."""
    at = {rank: [_index(groups, rank) for groups in partitions] for rank in ranks}
    return joined(ranks, _alike({rank: str(places) for rank, places in at.items()}))


def _index(groups: Groups, rank: int) -> int:
    return next(at for at, group in enumerate(groups) if rank in group)
