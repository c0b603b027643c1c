"""What every step gets: samples of step `own` are written down, then handed out as planned.

`Recorded` is what one rank saw. `Handed` chooses from all ranks' records. Samples are list items
(of a data loader) or rows (of a tensor). The same number of them is always dealt in the same order,
so inputs and targets stay together.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ddp_doctor.certificate.files import write
from ddp_doctor.certificate.plan import COPIES, DEAL, OWN, TWICE, Part
from ddp_doctor.facts.places import shown

FORWARD = "forward"  # the last part of a place at which a module is called
MARKED = "marked"  # the last part of a place at which a script marks a batch
DELIVERED = "delivered"  # the last part of a place at which one rank sends a tensor to all
# Where the script does something: file, line, instruction, whether the model only evaluates, what.
Place = tuple[Any, ...]
Key = tuple[Any, int]  # where samples come from, and how often they did in this step


@dataclass
class Recorded:
    """The samples of one rank's first step. `per_step`: batches per loader and step."""

    samples: dict[Key, Any] = field(default_factory=dict)
    per_step: dict[Hashable, int] = field(default_factory=dict)
    batches: dict[Hashable, int] = field(default_factory=dict)  # per loader and epoch
    # Of each call: the lengths of its tensors, and what else it is given.
    calls: dict[Key, tuple[list[int], str]] = field(default_factory=dict)
    ahead: bool = False  # whether a loader fetches one batch ahead
    modes: set[bool] = field(default_factory=set)  # whether the model evaluated, at each backward
    derived: set[Key] = field(default_factory=set)  # of samples that are computed from others
    foreign: list[str] = field(default_factory=list)  # classes of samples that no file takes

    @property
    def trains_only(self) -> bool:
        """Whether no backward pass was made in the mode for evaluation."""
        return self.modes == {False}

    def without_evaluation(self) -> None:
        """Forget what was recorded while the model evaluated, unless it is trained in that mode."""
        for kept in (self.samples, self.calls) if self.trains_only else ():
            for key in [k for k in kept if isinstance(k[0], tuple) and k[0][3] is True]:
                del kept[key]

    def save(self, path: Path) -> None:
        """Write a file for the other processes; samples that are no plain data are left out."""
        self.foreign = write(path, vars(self))
        if self.foreign:
            self.samples = {
                key: kept for key, kept in self.samples.items() if isinstance(key[0], tuple)
            }
            write(path, vars(self))


class Handed:
    """All ranks' records, once they are known: what a step of a kind gets at a place."""

    def __init__(self, part: Part, rank: int, records: list[Recorded]) -> None:
        self.part = part
        self.rank = rank
        self.records = records
        self.shards = False  # whether ranks hold shards of parameters
        first, *others = (one.calls for one in records)
        # Calls that were given other numbers or texts on another rank.
        self.mixed = {
            key
            for key, (_, plain) in first.items()
            if any(calls[key][1] != plain for calls in others if key in calls)
        }

    @cached_property
    def marked(self) -> bool:
        """Whether the script marks its batches: then nothing else is taken for samples."""
        return any(is_marked(key) for key in self.records[0].samples)

    @cached_property
    def loaded(self) -> bool:
        """Whether a data loader hands out the samples: then other tensors come from them."""
        return any(not isinstance(key[0], tuple) for key in self.records[0].samples)

    @cached_property
    def lengths(self) -> set[int]:
        """How many samples a batch has."""
        return {
            len(samples)
            for record in self.records
            for (place, _), samples in record.samples.items()
            if not isinstance(place, tuple) or FORWARD in place[-2:] or place[-1] == MARKED
        }

    @cached_property
    def batch_lengths(self) -> set[int]:
        """How many samples a loader's batch has."""
        return {
            len(samples)
            for record in self.records
            for (place, _), samples in record.samples.items()
            if not isinstance(place, tuple)
        }

    @cached_property
    def readers(self) -> list[int]:
        """Of each rank, the first with the same samples: ranks that split a layer share them."""
        ranks = range(len(self.records))
        if not self.shards:
            return list(ranks)
        return [
            next(r for r in ranks if same(self.records[r], self.records[rank])) for rank in ranks
        ]

    @property
    def passes(self) -> int:
        """How many passes one process makes for each of a rank's."""
        return len(self.records) if self.part.one and self.part.spread else 1

    def origin(self, key: Key) -> tuple[int, Key]:
        """Of one process with as many passes as all ranks: whose samples a pass gets, and which."""
        place, turn = key
        if self.passes == 1:
            return 0, key
        turns = [k[1] + 1 for k in self.records[0].samples if k[0] == place]
        rank, at = divmod(turn, self.records[0].per_step.get(place) or max(turns, default=1))
        return rank, (place, at)

    def of_each_rank(self, key: Key, kind: str = OWN) -> list[Any] | None:
        """What each rank had there; None if one of them had nothing."""
        records = self.records
        if self.passes > 1:
            rank, key = self.origin(key)
            records = self.records[:1] if kind == COPIES else self.records[rank : rank + 1]
        found = [record.samples.get(key) for record in records]
        return None if any(samples is None for samples in found) or not found else found

    def items(self, kind: str, key: Key) -> list[Any] | None:
        """The samples of a loader's batch; None if a rank had no such batch."""
        per_rank = self.of_each_rank(key, kind)
        if per_rank is None:
            return None
        if kind == COPIES:
            return list(per_rank[0])
        if kind == DEAL:
            return self._dealt(key, list)
        if self.part.one:
            copies = 2 if kind == TWICE else 1
            return copies * [sample for samples in per_rank for sample in samples]
        return list(per_rank[self.rank])

    def twice(self, key: Key, rows: torch.Tensor) -> torch.Tensor:
        """These rows and the same rows again; positions in a batch count on."""
        counts = self._permutes_a_batch(key) or _counts([rows])
        return torch.cat([rows, rows + len(rows) * counts])

    def rows(self, kind: str, key: Key) -> torch.Tensor | None:
        """A tensor of samples; None if they cannot be joined along the first dimension."""
        per_rank = self.of_each_rank(key, kind)
        if per_rank is None or kind == COPIES:
            return None if per_rank is None else per_rank[0]
        if self._permutes_a_batch(key):
            before = itertools.accumulate(map(len, per_rank), initial=0)
            joined = [order + first for order, first in zip(per_rank, before, strict=False)]
            return torch.cat(joined) if self.part.one else per_rank[self.rank]
        if kind == DEAL and _is_target(key) and _counts(per_rank):
            return torch.cat(per_rank) if self.part.one else per_rank[self.rank]
        in_a_batch = len(per_rank) == 1 or len(per_rank[0]) in self.lengths
        if not is_marked(key) and alike(per_rank) and not (kind == DEAL and in_a_batch):
            return per_rank[0]  # a constant
        if kind == DEAL:
            rows = self._dealt(key, lambda tensor: [row[None] for row in tensor])
            return torch.cat(rows) if joinable(rows) else None
        if not self.part.one:
            return per_rank[self.rank]
        return torch.cat(per_rank) if joinable(per_rank) else None

    def _permutes_a_batch(self, key: Key) -> bool:
        """Whether this is an order of a batch's rows, which each rank draws for its own."""
        per_rank = self.of_each_rank(key) or []
        return (
            isinstance(key[0], tuple)
            and key[0][-1:] == ("randperm",)
            and all(len(one) in self.lengths for one in per_rank)
        )

    def same_everywhere(self, key: Key) -> bool:
        """Whether a tensor is no sample: equal on all ranks, and at every turn of the step."""
        turns = [one.samples[k] for one in self.records for k in one.samples if k[0] == key[0]]
        return alike(turns)

    def drawn_alike(self, key: Key) -> bool:
        """Whether ranks that have other samples drew the same tensor: noise, or no samples."""
        per_rank = self.of_each_rank(key) or []
        first, *others = self.records
        return len(per_rank) > 1 and alike(per_rank) and not any(same(first, o) for o in others)

    def of_sizes(self, key: Key) -> bool:
        """Whether a tensor's values are alike as far as its sizes are: positions, or a mask."""
        per_rank = self.of_each_rank(key) or []
        shapes = {one.shape for one in per_rank}
        if len(shapes) < 2 or len({len(shape) for shape in shapes}) > 1:
            return False
        common = [min(sizes) for sizes in zip(*shapes, strict=True)]
        parts = [one[tuple(map(slice, common))] for one in per_rank]
        return 0 not in common and alike(parts)

    def follows(self, key: Key, value: torch.Tensor) -> bool:
        """Whether one process computes this from what it was handed: a sum over all, or a shape
        that neither one rank's nor all ranks' samples have.
        """
        per_rank = self.of_each_rank(key)
        assert per_rank is not None
        shapes = [per_rank[0].shape]
        shapes += [torch.cat(per_rank).shape] if joinable(per_rank) else []
        if value.shape not in shapes:
            return True
        if len(per_rank) == 1 or any(one.shape != value.shape for one in per_rank):
            return False
        total = torch.stack([one.double() for one in per_rank]).sum(0)
        return bool(total.any()) and torch.allclose(total, value.double())

    def _dealt(self, key: Key, parts: Callable[[Any], list[Any]]) -> list[Any]:
        """This batch's share of a step's samples of a place; one process gets all ranks' shares."""
        if self.passes > 1:
            rank, key = self.origin(key)
            pool = parts(self.records[rank].samples[key])
            return [pool[at] for at in dealt(len(pool))]
        me = self.rank if self.part.one else self.readers[self.rank]
        keys = [
            (rank, (place, turn))
            for rank, one in enumerate(self.records)
            if self.part.one or self.readers[rank] == rank
            for place, turn in sorted((k for k in one.samples if k[0] == key[0]), key=_turn)
            if turn < one.per_step.get(place, turn + 1)
            # Each turn for itself in one process, and where each is another optimizer's.
            and (turn == key[1] or not (self.part.one or self.part.turns > 1))
        ]
        # A batch that is used at several turns is one batch.
        first = {(rank, k): self._first_like(rank, k) for rank, k in keys}
        keys = [each for each in keys if first[each] == each[1]]
        key = first.get((me, key), key)
        each = [parts(self.records[rank].samples[k]) for rank, k in keys]
        pool = [sample for samples in each for sample in samples]
        mine = [n for n, (rank, k) in enumerate(keys) if k == key and rank == me]
        before = sum(map(len, each[: mine[0]]))
        count = len(pool) if self.part.one else len(each[mine[0]])
        return [pool[n] for n in dealt(len(pool))[before : before + count]]

    def _first_like(self, rank: int, key: Key) -> Key:
        """The first turn at which this rank had the very samples that it had at `key`."""
        samples = self.records[rank].samples
        if not isinstance(samples[key], torch.Tensor):
            return key
        turns = ((key[0], turn) for turn in range(key[1]))
        return next((k for k in turns if k in samples and alike([samples[k], samples[key]])), key)


def same(one: Recorded, other: Recorded) -> bool:
    """Whether two ranks recorded the same samples. Only tensors and numbers are compared."""
    if one is other:
        return True
    ours, theirs = (tree_flatten(each.samples) for each in (one, other))
    return ours[1] == theirs[1] and all(map(_equal, ours[0], theirs[0]))


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return alike([ours, theirs])
    return isinstance(ours, int | float | str) and type(ours) is type(theirs) and ours == theirs


def line_of(place: Place) -> str:
    """`file:line`, as a reader knows it."""
    return f"{shown(str(place[0]))}:{place[1]}"


def is_marked(key: Key) -> bool:
    """Whether a script marks a batch here."""
    return isinstance(key[0], tuple) and key[0][-1] == MARKED


def is_delivered(key: Key) -> bool:
    """Whether one rank sends a tensor to all here."""
    return isinstance(key[0], tuple) and key[0][-1] == DELIVERED


def _is_target(key: Key) -> bool:
    """Whether it is the second argument of a loss, or of another module."""
    place = key[0]
    names = ("cross_entropy", "nll_loss", FORWARD)
    return isinstance(place, tuple) and place[-1] == 1 and place[-2] in names


def _counts(per_rank: Sequence[torch.Tensor]) -> bool:
    """Whether the ranks count 0, 1, 2, … together: positions in a batch stay where they are."""
    joined = torch.cat(list(per_rank)) if joinable(per_rank) else torch.zeros(0)
    counted = torch.arange(len(joined), device="cpu")
    return not joined.is_floating_point() and torch.equal(joined, counted)


def _turn(key: Key) -> int:
    return key[1]


def dealt(count: int) -> list[int]:
    """The order in which `count` samples are dealt: equal for all tensors and lists that long."""
    generator = torch.Generator().manual_seed(count)
    return torch.randperm(count, generator=generator, device="cpu").tolist()


def alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are equal; NaN equals NaN."""
    first = tensors[0]
    return all(
        one.shape == first.shape
        and one.dtype == first.dtype
        and torch.equal(one.nan_to_num(), first.nan_to_num())
        for one in tensors[1:]
    )


def joinable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they can be concatenated along dimension 0."""
    if not tensors:
        return False
    first = tensors[0]
    return first.dim() > 0 and all(
        one.dim() == first.dim() and one.shape[1:] == first.shape[1:] and one.dtype == first.dtype
        for one in tensors[1:]
    )
