"""Data loaders: their samples are written down, and others handed out, before they are collated.

The samples pass through the loader's own `collate_fn`, so a batch of all ranks' samples is padded
as one process would pad it. They are made in the process itself, whatever `num_workers` says.
"""

import contextlib
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddp_doctor.certificate.files import Place
from ddp_doctor.certificate.plan import LATER
from ddp_doctor.certificate.samples import LOADER
from ddp_doctor.certificate.steps import Steps
from ddp_doctor.certificate.tensors import Tensors

LOOKS_AHEAD = "accelerate.data_loader"  # the module of loaders that fetch one batch ahead


class Loaders:
    """Replaces `DataLoader.__iter__` wherever gradients are on."""

    def __init__(self, steps: Steps, tensors: Tensors) -> None:
        self.steps = steps
        self.tensors = tensors
        self.loaders: list[DataLoader[Any]] = []
        self.batches: Counter[Place] = Counter()  # that were fetched from each
        steps.ends.append(self._end_step)
        original = DataLoader.__iter__

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return self._iterate(loader) if torch.is_grad_enabled() else original(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
        self.length = DataLoader.__len__
        DataLoader.__len__ = self._length()  # type: ignore[method-assign]

    def _length(self) -> Callable[[DataLoader[Any]], int]:
        """One process has as many steps in an epoch as a rank, with larger batches."""

        @functools.wraps(self.length)
        def length(loader: DataLoader[Any]) -> int:
            batches = self.length(loader)
            dealer, place = self.steps.dealer, self._place(loader)
            if dealer is None or place is None:
                return batches
            return dealer.records[0].batches.get(place, batches) * dealer.passes

        return length

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        place = self._place(loader)
        if place is None:
            self.loaders.append(loader)
            place = self._place(loader)
            assert place is not None
            with contextlib.suppress(TypeError):  # a dataset without a length
                self.steps.record.batches[place] = self.length(loader)
        return self._batches(loader, place, _samples(loader))

    def _place(self, loader: DataLoader[Any]) -> Place | None:
        """None for a loader that nothing has been fetched from."""
        number = next((n for n, other in enumerate(self.loaders) if other is loader), None)
        return None if number is None else Place("", number, function=LOADER)

    def _batches(
        self, loader: DataLoader[Any], place: Place, source: Iterator[Any]
    ) -> Iterator[Any]:
        while True:
            frame = sys._getframe().f_back
            fetches_ahead = frame is not None and frame.f_globals.get("__name__") == LOOKS_AHEAD
            with self.tensors.hidden():
                samples = next(source, None)
                if samples is None:
                    return
                batch = _collate(loader, self._plan(place, samples, fetches_ahead))
            yield self.tensors.note_batch(batch)

    def _plan(self, place: Place, samples: list[Any], fetches_ahead: bool) -> list[Any]:
        """The samples of a loader's batch, written down, or what the plan says instead."""
        batches = self.batches[place]
        self.batches[place] += 1
        dealer = self.steps.dealer
        if dealer is None:
            self.steps.record.samples[place, batches] = samples
            self.steps.record.fetches_ahead |= fetches_ahead
            return samples
        per_step = max(1, dealer.records[0].per_step.get(place, 1)) * dealer.passes
        step, at = divmod(batches, per_step)
        kind = self.steps.kind(step)
        return samples if kind == LATER else dealer.items(kind, (place, at)) or samples

    def _end_step(self) -> None:
        record = self.steps.record
        for place, batches in self.batches.items():
            record.per_step[place] = batches - record.fetches_ahead


def _samples(loader: DataLoader[Any]) -> Iterator[list[Any]]:
    """Each batch's samples as the loader would make them, before they are collated.

    The loader's attributes are read at once, while the script may expect torch to read them.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return _chunks(iter(dataset), loader.batch_size or 1, loader.drop_last)
    if loader.batch_sampler is None:
        return ([dataset[index]] for index in loader.sampler)
    get_items = getattr(dataset, "__getitems__", None)
    return (
        list(get_items(indices)) if get_items else [dataset[index] for index in indices]
        for indices in loader.batch_sampler
    )


def _chunks(items: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    while samples := list(itertools.islice(items, size)):
        if drop_last and len(samples) < size:
            return
        yield samples


def _collate(loader: DataLoader[Any], samples: list[Any]) -> Any:
    if loader.batch_size is None and loader.batch_sampler is None:
        return loader.collate_fn(samples[0])
    return loader.collate_fn(samples)
