"""Data loaders: their samples are written down, and others handed out, before they are collated.

The samples pass through the loader's own `collate_fn`, so a batch of all ranks' samples is padded
as one process would pad it. They are made in the process itself, whatever `num_workers` says.
"""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddp_doctor.certificate.plan import LATER
from ddp_doctor.certificate.steps import Steps
from ddp_doctor.certificate.tensors import Tensors

LOOKS_AHEAD = "accelerate.data_loader"  # the module of loaders that fetch one batch ahead


class Loaders:
    """Replaces `DataLoader.__iter__` wherever gradients are on."""

    def __init__(self, steps: Steps, tensors: Tensors) -> None:
        self.steps = steps
        self.tensors = tensors
        self.known: list[DataLoader[Any]] = []
        self.fetched: dict[int, int] = {}
        steps.ends.append(self._end_of_first_step)
        plain = DataLoader.__iter__

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return self._iterate(loader) if torch.is_grad_enabled() else plain(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
        self.length = DataLoader.__len__
        DataLoader.__len__ = self._length()  # type: ignore[method-assign]

    def _length(self) -> Callable[[DataLoader[Any]], int]:
        """One process has as many steps in an epoch as a rank, with larger batches."""

        @functools.wraps(self.length)
        def length(loader: DataLoader[Any]) -> int:
            batches = self.length(loader)
            at = next((n for n, known in enumerate(self.known) if known is loader), None)
            handed = self.steps.handed
            if at is None or handed is None:
                return batches
            return handed.records[0].batches.get(at, batches) * handed.passes

        return length

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if not any(loader is known for known in self.known):
            self.known.append(loader)
            with contextlib.suppress(TypeError):  # a dataset without a length
                self.steps.recorded.batches[len(self.known) - 1] = self.length(loader)
        at = next(n for n, known in enumerate(self.known) if known is loader)
        return self._batches(loader, at, _natural(loader))

    def _batches(self, loader: DataLoader[Any], at: int, source: Iterator[Any]) -> Iterator[Any]:
        while True:
            frame = sys._getframe().f_back
            ahead = frame is not None and frame.f_globals.get("__name__") == LOOKS_AHEAD
            with self.tensors.unseen():
                samples = next(source, None)
                if samples is None:
                    return
                batch = _collated(loader, self._planned(at, samples, ahead))
            yield self.tensors.from_loader(batch)

    def _planned(self, loader: int, samples: list[Any], ahead: bool) -> list[Any]:
        fetched = self.fetched.get(loader, 0)
        self.fetched[loader] = fetched + 1
        handed = self.steps.handed
        if handed is None:
            self.steps.recorded.samples[loader, fetched] = samples
            self.steps.recorded.ahead |= ahead
            return samples
        step, at = divmod(
            fetched, max(1, handed.records[0].per_step.get(loader, 1)) * handed.passes
        )
        kind = self.steps.kind(step)
        return samples if kind == LATER else handed.items(kind, (loader, at)) or samples

    def _end_of_first_step(self) -> None:
        recorded = self.steps.recorded
        for loader, fetched in self.fetched.items():
            recorded.per_step[loader] = fetched - recorded.ahead


def _natural(loader: DataLoader[Any]) -> Iterator[list[Any]]:
    """Each batch's samples as the loader would make them, before they are collated.

    The loader's attributes are read at once, while the script may expect torch to read them.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return _chunks(iter(dataset), loader.batch_size or 1, loader.drop_last)
    if loader.batch_sampler is None:
        return ([dataset[index]] for index in loader.sampler)
    several = getattr(dataset, "__getitems__", None)
    return (
        list(several(indices)) if several else [dataset[index] for index in indices]
        for indices in loader.batch_sampler
    )


def _chunks(items: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    while samples := list(itertools.islice(items, size)):
        if drop_last and len(samples) < size:
            return
        yield samples


def _collated(loader: DataLoader[Any], samples: list[Any]) -> Any:
    if loader.batch_size is None and loader.batch_sampler is None:
        return loader.collate_fn(samples[0])
    return loader.collate_fn(samples)
