"""Samplers, loaders and data sets: who gets which rows, in which order, in which epoch."""

import zlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, dataloader

from ddp_doctor.facts.containers import tensors_in
from ddp_doctor.facts.fingerprints import checksum
from ddp_doctor.facts.places import place
from ddp_doctor.facts.types import BatchFact, LoaderFact, SamplerFact
from ddp_doctor.observe.patching import Args, Kwargs, Patches
from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.observe.states import Numbers

MAX_ROWS = 4096
MAX_BYTES = 1 << 24


def install(recorder: Recorder, patches: Patches) -> None:
    of = _Data(recorder)
    patches.observe(DistributedSampler, "__iter__", after=of.sampled)
    patches.observe(dataloader.DataLoader, "__iter__", of.iterated)
    # Private, and the only place that every loader's batches pass through.
    iterator = dataloader._BaseDataLoaderIter
    patches.observe(iterator, "__next__", of.waiting, of.delivered, failed=of.over)


class _Data:
    """The samplers, loaders and batches of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.session = recorder.session
        self.samplers, self.loaders, self.iterators = Numbers(), Numbers(), Numbers()
        self.epochs: Counter[int] = Counter()  # by sampler
        self.described: set[int] = set()  # loaders
        self.rows: dict[int, int] = {}  # by iterator; a batch without rows counts as one

    def sampled(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        """A sampler begins an epoch."""
        sampler = args[0]
        number = self.samplers.of(sampler)
        self.epochs[number] += 1
        if self.epochs[number] > 20 or number > 40:
            return
        fact = SamplerFact(
            sampler=number,
            epoch=getattr(sampler, "epoch", None),
            seed=getattr(sampler, "seed", None),
            shuffle=bool(getattr(sampler, "shuffle", False)),
            replicas=getattr(sampler, "num_replicas", None),
            length=_length(getattr(sampler, "dataset", None)),
            grad=torch.is_grad_enabled(),
            backwards=self.recorder.backward_count,
            place=place(),
        )
        self.session.write("sampler", **fact)

    def iterated(self, args: Args, kwargs: Kwargs) -> None:
        """A loader is about to be read: the first time, say what it is."""
        loader = args[0]
        number = self.loaders.of(loader)
        if number in self.described or len(self.described) >= 12:
            return
        self.described.add(number)
        inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        usual = type(inner) in (RandomSampler, SequentialSampler)
        fact = LoaderFact(
            dataset=type(loader.dataset).__name__,
            length=_length(loader.dataset),
            content=_content(loader.dataset),
            usual=usual and not getattr(inner, "replacement", False),
            replicas=_replicas(loader),
            grad=torch.is_grad_enabled(),
            place=place(),
        )
        self.session.write("loader", **fact)

    def waiting(self, args: Args, kwargs: Kwargs) -> None:
        self.session.set_status("waiting for the data loader")

    def delivered(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        """A loader has returned a batch."""
        self.session.set_status("running")
        if not torch.is_grad_enabled():
            return
        key = self.iterators.of(args[0])
        if key not in self.rows and len(self.rows) >= 2:
            return
        seen = self.rows.setdefault(key, 0)
        if seen < MAX_ROWS:
            tensors = [tensor for tensor in tensors_in(result) if tensor.dim()][:8]
            found = _rows(tensors)
            self.rows[key] = seen + max(1, len(found))
            size = min((tensor.shape[0] for tensor in tensors), default=0)
            self.session.write("batch", **BatchFact(iterator=key, size=size, rows=found))

    def over(self, error: BaseException) -> None:
        self.session.set_status("running")


def _replicas(loader: Any) -> int | None:
    """Into how many parts a sampler cuts the data; None without such a one."""
    samplers: list[Any] = [loader.sampler, loader.batch_sampler]
    parts: list[Any] = []
    while samplers and len(parts) < 8:
        one = samplers.pop()
        own = getattr(one, "__dict__", {})  # of none that it wraps
        parts.append(own.get("num_replicas", own.get("num_processes")))
        samplers += [own[name] for name in ("sampler", "batch_sampler") if name in own]
    return max((number for number in parts if isinstance(number, int)), default=None)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _rows(tensors: list[Tensor]) -> list[int]:
    """A hash per row of a batch, over all its tensors, of at most 4 KiB per row and tensor."""
    if not tensors:
        return []
    count = min(tensor.shape[0] for tensor in tensors)
    return [
        zlib.crc32(b"".join(checksum(tensor[at], 4096).to_bytes(4, "big") for tensor in tensors))
        for at in range(min(count, 256))
    ]


def _content(dataset: Any) -> int | None:
    """A hash of what a data set holds: tensors, numbers, text, also inside of lists and dicts.

    No item is asked for.
    """
    attributes = getattr(dataset, "__dict__", {})
    found: list[bytes] = []
    left = [MAX_BYTES]

    def look(value: Any, depth: int) -> None:
        if left[0] <= 0 or len(found) > 4096:
            return
        if isinstance(value, Tensor):
            if value.dim():
                size = min(left[0], value.numel() * value.element_size())
                left[0] -= size
                found.append(checksum(value, max(1, size)).to_bytes(4, "big"))
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            if getattr(value, "size", 0) and value.nbytes <= left[0]:
                left[0] -= value.nbytes
                found.append(zlib.crc32(value.tobytes()).to_bytes(4, "big"))
        elif isinstance(value, int | float | str):
            found.append(repr(value)[:4096].encode())
        elif depth < 4 and isinstance(value, dict):
            look(list(value.items()), depth + 1)
        elif depth < 4 and isinstance(value, list | tuple):
            for element in value[:1024]:
                look(element, depth + 1)

    held = [dataset] if isinstance(dataset, list | tuple) else []
    held += [value for _, value in sorted(attributes.items())]
    for value in held:
        if isinstance(value, Tensor | list | tuple) or type(value).__module__ == "numpy":
            look(value, 0)
    return zlib.crc32(b"".join(found)) if found else None
