"""What every step gets: samples of step `own` are written down, then dealt as planned.

`Record` is what one rank saw. `Dealer` chooses from all ranks' records. Samples are list items (of
a data loader) or rows (of a tensor). The same number of them is always dealt in the same order, so
inputs and targets stay together.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ddp_doctor.certificate.files import Place, write
from ddp_doctor.certificate.plan import COPIES, DEAL, OWN, TWICE, Part
from ddp_doctor.facts.places import shown

# The function of a place that is none of torch's:
LOADER = "loader"  # a data loader hands out a batch
FORWARD = "forward"  # a module is called
MARKED = "marked"  # a script marks a batch
DELIVERED = "delivered"  # one rank sends a tensor to all
Key = tuple[Place, int]  # where samples come from, and how often they did in this step


@dataclass
class Record:
    """The samples of one rank's first step. `per_step`: batches per loader and step."""

    samples: dict[Key, Any] = field(default_factory=dict)
    per_step: dict[Place, int] = field(default_factory=dict)
    batches: dict[Place, int] = field(default_factory=dict)  # per loader and epoch
    # Of each call: the lengths of its tensors, and what else it is given.
    calls: dict[Key, tuple[list[int], str]] = field(default_factory=dict)
    fetches_ahead: bool = False  # whether a loader fetches one batch ahead
    modes: set[bool] = field(default_factory=set)  # whether the model evaluated, at each backward
    derived_keys: set[Key] = field(default_factory=set)  # of samples that are computed from others
    foreign_classes: list[str] = field(default_factory=list)  # of samples that no file takes

    @property
    def trains_only(self) -> bool:
        """Whether no backward pass was made in the mode for evaluation."""
        return self.modes == {False}

    def forget_evaluation(self) -> None:
        """Forget what was recorded while the model evaluated, unless it is trained in that mode."""
        for values in (self.samples, self.calls) if self.trains_only else ():
            for key in [k for k in values if k[0].evaluates]:
                del values[key]

    def save(self, path: Path) -> None:
        """Write a file for the other processes; samples that are no plain data are left out."""
        self.foreign_classes = write(path, vars(self))
        if self.foreign_classes:
            self.samples = {k: v for k, v in self.samples.items() if k[0].function != LOADER}
            write(path, vars(self))


class Dealer:
    """All ranks' records, once they are known: what a step of a kind gets at a place."""

    def __init__(self, part: Part, rank: int, records: list[Record]) -> None:
        self.part = part
        self.rank = rank
        self.records = records
        self.shards = False  # whether ranks hold shards of parameters

    @cached_property
    def calls_with_other_numbers(self) -> set[Key]:
        """Calls that were given other numbers or texts on another rank."""
        first, *others = (record.calls for record in self.records)
        return {
            key
            for key, (_, numbers) in first.items()
            if any(calls[key][1] != numbers for calls in others if key in calls)
        }

    @cached_property
    def is_marked(self) -> bool:
        """Whether the script marks its batches: then nothing else is taken for samples."""
        return any(place.function == MARKED for place, _ in self.records[0].samples)

    @cached_property
    def has_loader(self) -> bool:
        """Whether a data loader hands out the samples: then other tensors come from them."""
        return any(place.function == LOADER for place, _ in self.records[0].samples)

    @cached_property
    def loader_lengths(self) -> set[int]:
        """How many samples a loader's batch has."""
        return self._lengths(LOADER)

    @cached_property
    def lengths(self) -> set[int]:
        """How many samples a batch has."""
        return self._lengths(LOADER, FORWARD, MARKED)

    def _lengths(self, *functions: str) -> set[int]:
        items = (item for record in self.records for item in record.samples.items())
        return {len(samples) for (place, _), samples in items if place.function in functions}

    @cached_property
    def readers(self) -> list[int]:
        """Of each rank, the first with the same samples: ranks that split a layer share them."""
        ranks = range(len(self.records))
        if not self.shards:
            return list(ranks)
        return [
            next(r for r in ranks if same_samples(self.records[r], self.records[rank]))
            for rank in ranks
        ]

    @property
    def passes(self) -> int:
        """How many passes one process makes for each of a rank's."""
        return len(self.records) if self.part.is_one and self.part.all_passes else 1

    def origin(self, key: Key) -> tuple[int, Key]:
        """Of one process with as many passes as all ranks: whose samples a pass gets, and which."""
        place, turn = key
        if self.passes == 1:
            return 0, key
        turns = [k[1] + 1 for k in self.records[0].samples if k[0] == place]
        rank, at = divmod(turn, self.records[0].per_step.get(place) or max(turns, default=1))
        return rank, (place, at)

    def per_rank(self, key: Key, kind: str = OWN) -> list[Any] | None:
        """What each rank had there; None if one of them had nothing."""
        records = self.records
        if self.passes > 1:
            rank, key = self.origin(key)
            records = self.records[:1] if kind == COPIES else self.records[rank : rank + 1]
        if not records or any(record.samples.get(key) is None for record in records):
            return None
        return [record.samples[key] for record in records]

    def items(self, kind: str, key: Key) -> list[Any] | None:
        """The samples of a loader's batch; None if a rank had no such batch."""
        per_rank = self.per_rank(key, kind)
        if per_rank is None:
            return None
        if kind == COPIES:
            return list(per_rank[0])
        if kind == DEAL:
            return self._share(key, list)
        if self.part.is_one:
            copies = 2 if kind == TWICE else 1
            return copies * [sample for samples in per_rank for sample in samples]
        return list(per_rank[self.rank])

    def rows(self, kind: str, key: Key, length: int) -> torch.Tensor | None:
        """A tensor of samples, of which the script has `length` here; None if they cannot be joined
        along the first dimension.

        What all ranks have alike is there once per rank if there is a row for each of all samples;
        what all are sent, too if it has as many rows as a batch.
        """
        per_rank = self.per_rank(key, kind)
        copies, is_one = 2 if kind == TWICE else 1, self.part.is_one
        if per_rank is None or kind == COPIES:
            return None if per_rank is None else per_rank[0]
        permutes = self._permutes_a_batch(key)
        if permutes:
            starts = itertools.accumulate(map(len, per_rank), initial=0)
            per_rank = [order + start for order, start in zip(per_rank, starts, strict=False)]
        elif not (kind == DEAL and _is_target(key[0]) and _counts(per_rank)):
            count = len(per_rank[0])
            in_a_batch = len(per_rank) == 1 or count in self.lengths
            if key[0].function != MARKED and alike(per_rank) and not (kind == DEAL and in_a_batch):
                of_all = length == copies * len(per_rank) * count
                of_batch = is_one and key[0].function == DELIVERED and count in self.lengths
                if len(per_rank) > 1 and not (of_all or of_batch):
                    return per_rank[0]  # a constant
            elif kind == DEAL:
                dealt = self._share(key, lambda tensor: [row[None] for row in tensor])
                return torch.cat(dealt) if joinable(dealt) else None
        if not is_one:
            return per_rank[self.rank]
        rows = torch.cat(per_rank) if joinable(per_rank) else None
        if rows is None or copies == 1:
            return rows
        counts = permutes or _counts([rows])  # positions in a batch count on
        return torch.cat([rows, rows + len(rows) * counts])

    def _permutes_a_batch(self, key: Key) -> bool:
        """Whether this is an order of a batch's rows, which each rank draws for its own."""
        per_rank = self.per_rank(key) or []
        draws = key[0].function == "randperm" and key[0].argument < 0
        return draws and all(len(order) in self.lengths for order in per_rank)

    def same_everywhere(self, key: Key) -> bool:
        """Whether a tensor is no sample: equal on all ranks, and at every turn of the step."""
        records = self.records
        return alike([r.samples[k] for r in records for k in r.samples if k[0] == key[0]])

    def drawn_alike(self, key: Key) -> bool:
        """Whether ranks that have other samples drew the same tensor: noise, or no samples."""
        per_rank = self.per_rank(key) or []
        copies = any(same_samples(self.records[0], record) for record in self.records[1:])
        return len(per_rank) > 1 and alike(per_rank) and not copies

    def depends_on_sizes(self, key: Key) -> bool:
        """Whether a tensor's values are alike as far as its sizes are: positions, or a mask."""
        per_rank = self.per_rank(key) or []
        shapes = {tensor.shape for tensor in per_rank}
        if len(shapes) < 2 or len({len(shape) for shape in shapes}) > 1:
            return False
        sizes = [min(dimension) for dimension in zip(*shapes, strict=True)]
        parts = [tensor[tuple(map(slice, sizes))] for tensor in per_rank]
        return 0 not in sizes and alike(parts)

    def follows(self, key: Key, value: torch.Tensor) -> bool:
        """Whether one process computes this from what it was handed: a sum over all, or a shape
        that neither one rank's nor all ranks' samples have.
        """
        per_rank = self.per_rank(key)
        assert per_rank is not None
        shapes = [per_rank[0].shape]
        shapes += [torch.cat(per_rank).shape] if joinable(per_rank) else []
        if value.shape not in shapes:
            return True
        if len(per_rank) == 1 or any(tensor.shape != value.shape for tensor in per_rank):
            return False
        total = torch.stack([tensor.double() for tensor in per_rank]).sum(0)
        return bool(total.any()) and torch.allclose(total, value.double())

    def _share(self, key: Key, samples_in: Callable[[Any], list[Any]]) -> list[Any]:
        """This batch's share of a step's samples of a place; one process gets all ranks' shares."""
        if self.passes > 1:
            rank, key = self.origin(key)
            pool = samples_in(self.records[rank].samples[key])
            return [pool[at] for at in order_of_deal(len(pool))]
        rank = self.rank if self.part.is_one else self.readers[self.rank]
        keys = [
            (owner, (place, turn))
            for owner, record in enumerate(self.records)
            if self.part.is_one or self.readers[owner] == owner
            for place, turn in sorted(k for k in record.samples if k[0] == key[0])
            if turn < record.per_step.get(place, turn + 1)
            # Each turn for itself in one process, and where each is another optimizer's.
            and (turn == key[1] or not (self.part.is_one or self.part.turns > 1))
        ]
        # A batch that is used at several turns is one batch.
        originals = {(owner, k): self._original(owner, k) for owner, k in keys}
        keys = [pair for pair in keys if originals[pair] == pair[1]]
        key = originals.get((rank, key), key)
        batches = [samples_in(self.records[owner].samples[k]) for owner, k in keys]
        pool = [sample for batch in batches for sample in batch]
        at = keys.index((rank, key))
        start = sum(map(len, batches[:at]))
        count = len(pool) if self.part.is_one else len(batches[at])
        return [pool[n] for n in order_of_deal(len(pool))[start : start + count]]

    def _original(self, rank: int, key: Key) -> Key:
        """The first turn at which this rank had the very samples that it had at `key`."""
        samples = self.records[rank].samples
        if not isinstance(samples[key], torch.Tensor):
            return key
        turns = ((key[0], turn) for turn in range(key[1]))
        return next((k for k in turns if k in samples and alike([samples[k], samples[key]])), key)


def same_samples(record: Record, other: Record) -> bool:
    """Whether two ranks recorded the same samples. Only tensors and numbers are compared."""
    if record is other:
        return True
    (leaves, spec), (others, other_spec) = (tree_flatten(r.samples) for r in (record, other))
    return bool(spec == other_spec) and all(map(_equal, leaves, others))


def _equal(sample: Any, other: Any) -> bool:
    if isinstance(sample, torch.Tensor) and isinstance(other, torch.Tensor):
        return alike([sample, other])
    is_plain = isinstance(sample, int | float | str) and type(sample) is type(other)
    return is_plain and bool(sample == other)


def line_of(place: Place) -> str:
    """`file:line`, as a reader knows it."""
    return f"{shown(place.file)}:{place.line}"


def _is_target(place: Place) -> bool:
    """Whether it is the second argument of a loss, or of another module."""
    return place.argument == 1 and place.function in ("cross_entropy", "nll_loss", FORWARD)


def _counts(per_rank: Sequence[torch.Tensor]) -> bool:
    """Whether the ranks count 0, 1, 2, … together: positions in a batch stay where they are."""
    rows = torch.cat(list(per_rank)) if joinable(per_rank) else torch.zeros(0)
    positions = torch.arange(len(rows), device="cpu")
    return not rows.is_floating_point() and torch.equal(rows, positions)


def order_of_deal(count: int) -> list[int]:
    """The order in which `count` samples are dealt: equal for all tensors and lists that long."""
    generator = torch.Generator().manual_seed(count)
    return torch.randperm(count, generator=generator, device="cpu").tolist()


def alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are equal; NaN equals NaN."""
    first = tensors[0]
    return all(
        tensor.shape == first.shape
        and tensor.dtype == first.dtype
        and torch.equal(tensor.nan_to_num(), first.nan_to_num())
        for tensor in tensors[1:]
    )


def joinable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they can be concatenated along dimension 0."""
    if not tensors or not tensors[0].dim():
        return False
    kinds = {(tensor.dim(), tensor.shape[1:], tensor.dtype) for tensor in tensors}
    return len(kinds) == 1
