"""Samplers, loaders and data sets: who gets which rows, in which order, in which epoch."""

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, dataloader

from ddp_doctor.fingerprints import checksum
from ddp_doctor.observe.batches import tensors_in
from ddp_doctor.observe.recorder import Recorder
from ddp_doctor.observe.states import Numbers
from ddp_doctor.patching import Patches
from ddp_doctor.places import place

MAX_ROWS = 4096
MAX_BYTES = 1 << 24


def install(recorder: Recorder, patches: Patches) -> None:
    session = recorder.session
    samplers, loaders, iterators = Numbers(), Numbers(), Numbers()
    epochs: dict[int, int] = {}
    described: set[int] = set()
    rows: dict[int, int] = {}  # by iterator; a batch without rows counts as one
    ends = [0]

    def sampled(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sampler = args[0]
        number = samplers.of(sampler)
        epochs[number] = epochs.get(number, 0) + 1
        if epochs[number] > 20 or number > 40:
            return
        session.write(
            "sampler",
            sampler=number,
            epoch=getattr(sampler, "epoch", None),
            seed=getattr(sampler, "seed", None),
            shuffle=bool(getattr(sampler, "shuffle", False)),
            replicas=getattr(sampler, "num_replicas", None),
            length=_length(getattr(sampler, "dataset", None)),
            drop_last=bool(getattr(sampler, "drop_last", False)),
            grad=torch.is_grad_enabled(),
            backwards=recorder.backward_count,
            place=place(),
        )

    def iterated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        loader = args[0]
        number = loaders.of(loader)
        if number in described or len(described) >= 12:
            return
        described.add(number)
        sampler = getattr(loader, "sampler", None)
        batches = getattr(loader, "batch_sampler", None)
        inner = getattr(batches, "sampler", None)
        session.write(
            "loader",
            dataset=type(loader.dataset).__name__,
            length=_length(loader.dataset),
            content=_content(loader.dataset),
            inner=type(inner).__name__,
            replacement=bool(getattr(inner, "replacement", False)),
            sharded=_sharded(loader),
            replicas=getattr(sampler, "num_replicas", getattr(batches, "num_processes", None)),
            grad=torch.is_grad_enabled(),
            place=place(),
        )

    def waiting(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.doing("waiting for the data loader")

    def delivered(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.doing("running")
        if not torch.is_grad_enabled():
            return
        key = iterators.of(args[0])
        if key not in rows:
            if len(rows) >= 2:
                return
            rows[key] = 0
        if rows[key] < MAX_ROWS:
            tensors = [tensor for tensor in tensors_in(result) if tensor.dim()][:8]
            found = _rows(tensors)
            rows[key] += max(1, len(found))
            session.write(
                "batch",
                iterator=key,
                size=min((tensor.shape[0] for tensor in tensors), default=0),
                rows=found,
            )

    def over(error: BaseException) -> None:
        session.doing("running")
        if isinstance(error, StopIteration) and torch.is_grad_enabled() and ends[0] < 50:
            ends[0] += 1
            session.write("loader ended", backwards=recorder.backward_count)

    patches.observe(DistributedSampler, "__iter__", after=sampled)
    patches.observe(dataloader.DataLoader, "__iter__", iterated)
    # Private, and the only place that every loader's batches pass through.
    patches.observe(dataloader._BaseDataLoaderIter, "__next__", waiting, delivered, failed=over)


def _sharded(loader: Any) -> bool:
    """Whether sampler or batch sampler give each rank its own part."""
    for candidate in (
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None),
        loader.dataset,
    ):
        name = type(candidate).__name__
        if "Distributed" in name or "Shard" in name or hasattr(candidate, "num_replicas"):
            return True
    return False


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
    """A hash of the tensors that a data set holds as attributes; no item is read."""
    try:
        attributes = vars(dataset)
    except TypeError:
        return None
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
        elif depth < 3 and isinstance(value, list | tuple) and len(value) <= 1024:
            for element in value:
                if isinstance(element, int | float | str):
                    found.append(repr(element).encode())
                else:
                    look(element, depth + 1)

    for name in sorted(attributes):
        value = attributes[name]
        if isinstance(value, Tensor | list | tuple) or type(value).__module__ == "numpy":
            look(value, 0)
    return zlib.crc32(b"".join(found)) if found else None
