"""A GPU pretended on a CPU: code that is written for a GPU runs, and a typing error in it shows.

Tensors that are put on a GPU lie on the CPU, streams and events do nothing but tell the time, and
memory is never used. What this shows of results is only that they are right when everything runs
in the program's order.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.torch_suite import placement


class PretendedStream:
    """A stream on which everything has run already."""

    def __init__(self, device: Any = None) -> None:
        """The device is the CPU in any case."""

    def wait_stream(self, other: Any) -> None:
        """It has run."""


class PretendedEvent:
    """The moment of the host at which it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.moment = 0.0

    def record(self) -> None:
        self.moment = time.perf_counter()

    def synchronize(self) -> None:
        """It has come."""

    def elapsed_time(self, later: "PretendedEvent") -> float:
        return 1e3 * (later.moment - self.moment)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """The device to hand to code for a GPU. Some of it stays: for a process that ends after it."""
    placement.pretend_devices(placement.CPU)
    for cls in (DistributedDataParallel, DropIn):
        placement.replace_device_ids(cls, placement.CPU)
    stream, generator, future, empty = PretendedStream(), torch.Generator, Future, torch.empty

    def on_stream(stream: Any) -> Any:
        return contextlib.nullcontext()

    def empty_anywhere(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    def generator_on(device: Any = None) -> torch.Generator:
        return generator()

    def future_on(devices: Any = None) -> Future:
        return future()

    with (
        # PyTorch's test utilities, which `placement` loads, forbid to set flags.
        torch.backends.__allow_nonbracketed_mutation(),
        mock.patch.object(torch.cuda, "Stream", PretendedStream),
        mock.patch.object(torch.cuda, "Event", PretendedEvent),
        mock.patch.object(torch.cuda, "stream", on_stream),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "_sleep"),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats"),
        mock.patch.object(torch, "Generator", generator_on),
        mock.patch.object(torch, "empty", empty_anywhere),
        mock.patch("tests.gpu.timeline.Future", future_on),
        placement.OnTarget(placement.CPU),
    ):
        placement.in_every_thread(placement.CPU)
        yield torch.device("cuda", 0)
