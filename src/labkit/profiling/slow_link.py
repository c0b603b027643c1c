"""A network of chosen bandwidth and latency, in software: what a laptop's loopback hides.

    link = SlowLink(gbit_per_s=1, latency_us=50)             # on each rank
    averager = DistributedDataParallel(module, process_group=link)

Results stay the same to the bit; only, a collective is not done before such a network would be done
with it. The model is that of a ring in which every rank sends and receives at full rate at once:
an all-reduce of n bytes over W ranks takes 2 (W-1) steps of n/W bytes,

    seconds = 2 (W-1) · (latency + (n/W) / bandwidth)

counted from its launch on the last rank, or from the end of the one before it, whichever is later:
collectives queue up as on one wire. The launch returns at once and backward goes on; a thread of
the link's own waits for the true collective, then for the modeled time, and only then lets the
handle's `wait` (and its future) return. So the link is never faster than the machine's own.

Ranks learn of each other's launches without a message: each appends the time to a file that the
others can read, before the true collective, which cannot end earlier. So all ranks have to be on
one machine. Its clock, `time.perf_counter`, is one for all processes. Any system, no rights needed;
the tensors must be on the CPU.

Source for the costs: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from labkit.profiling.wrapped_group import WrappedGroup, bytes_of, future_of

_TIME = struct.Struct("d")


def link_seconds(
    op: str, nbytes: int, world_size: int, bytes_per_second: float, latency: float
) -> float:
    """What one collective costs on a ring of `world_size` ranks, in seconds.

    Args:
        op: its name in `torch.distributed`: all_reduce, reduce_scatter, all_gather, all_to_all,
            broadcast, reduce, gather or barrier.
        nbytes: what each rank brings to it.
        bytes_per_second: what one rank can send, while it receives as much.
        latency: seconds a step.

    Raises NotImplementedError for another `op`.
    """
    others = world_size - 1
    steps_and_bytes = {
        "all_reduce": (2 * others, 2 * others * nbytes / world_size),
        "reduce_scatter": (others, others * nbytes / world_size),
        "all_gather": (others, others * nbytes),
        "all_to_all": (others, others * nbytes / world_size),
        "broadcast": (others, nbytes if others else 0),  # in many pieces, one behind another
        "reduce": (others, nbytes if others else 0),
        "gather": (others, others * nbytes),
        "barrier": (2 * others, 0),
    }
    if op not in steps_and_bytes:
        raise NotImplementedError(
            f"a slow link has no cost for {op}; it knows {', '.join(steps_and_bytes)}"
        )
    steps, sent = steps_and_bytes[op]
    return steps * latency + sent / bytes_per_second


class SlowLink(WrappedGroup):
    """A process group that is as slow as a network; every rank makes one, with equal arguments.

    Args:
        gbit_per_s: the rate at which each rank sends, in 10⁹ bit/s, and receives at the same time.
        latency_us: microseconds a step of the ring.
        group: the ranks, and what really carries the data; the default group when None.

    Raises:
        ValueError: a rate that is not positive, or a negative latency.
        RuntimeError: on every rank, if they are not on one machine.
        NotImplementedError: at a launch, of tensors that are not on the CPU or of a collective
            that has no cost here. An error of the collective itself comes out of its handle.

    Costs a thread and W + 1 open files, which go with the object, or at `close`, and about 0.1 ms a
    collective beyond the machine's own time for it.
    """

    def __init__(
        self,
        gbit_per_s: float,
        latency_us: float = 50.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not gbit_per_s > 0 or not latency_us >= 0:
            raise ValueError(
                f"gbit_per_s={gbit_per_s}, latency_us={latency_us}: a link needs a positive rate "
                "and a latency of 0 or more"
            )
        super().__init__(group)
        self.bytes_per_second = gbit_per_s * 1e9 / 8
        self.latency = latency_us * 1e-6
        self.launches = 0
        self._log, logs = _open_logs(self.inner)
        self._deliveries: SimpleQueue[_Delivery | None] = SimpleQueue()
        wire = threading.Thread(
            target=_deliver, args=(self._deliveries, logs), name="slow link", daemon=True
        )
        wire.start()
        self.close = weakref.finalize(self, _stop, self._deliveries, wire, self._log)

    def seconds(self, op: str, nbytes: int) -> float:
        """What one collective costs on this link; see `link_seconds`."""
        return link_seconds(op, nbytes, self.size(), self.bytes_per_second, self.latency)

    def carry(self, op: str, tensors: Sequence[Tensor], launch: Callable[[], dist.Work]) -> Any:
        if elsewhere := [tensor.device for tensor in tensors if tensor.device.type != "cpu"]:
            raise NotImplementedError(
                f"a slow link carries tensors on the CPU and was given one on {elsewhere[0]}. "
                'Start the ranks with device="cpu".'
            )
        if not self.close.alive:
            raise RuntimeError("this slow link has been closed; make another")
        seconds = self.seconds(op, bytes_of(tensors))
        self._log.write(_TIME.pack(time.perf_counter()))
        number, self.launches = self.launches, self.launches + 1
        delivery = _Delivery(number, launch(), seconds, Future())
        self._deliveries.put(delivery)
        return _Handle(delivery)


class _Delivery(NamedTuple):
    number: int
    work: dist.Work
    seconds: float
    done: Future  # of None, or of an exception


class _Handle(dist.Work):
    """What the launch returns, to Python and to C++."""

    def __init__(self, delivery: _Delivery) -> None:
        super().__init__()
        self.done = delivery.done
        # An error set on a future from Python is a value to C++; one raised in `then` is an error.
        self.future = delivery.done.then(partial(_result, delivery.work))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The timeout is that of the true collective."""
        if (error := self.done.wait()) is not None:
            raise error
        return True

    def get_future(self) -> Future:
        return self.future

    def is_completed(self) -> bool:
        return self.done.done()


def _result(work: dist.Work, done: Future) -> Any:
    if (error := done.value()) is not None:
        raise error
    future = future_of(work)
    return None if future is None else future.value()


def _deliver(deliveries: SimpleQueue[_Delivery | None], logs: list[FileIO]) -> None:
    """The wire: one delivery after another, none before its time."""
    with contextlib.ExitStack() as open_logs:
        for log in logs:
            open_logs.enter_context(log)
        busy_until = 0.0
        while (delivery := deliveries.get()) is not None:
            try:
                delivery.work.wait()
                launched = [_launch_time(log, delivery.number) for log in logs]
                # A root need not wait for the others, and then has not heard of all of them.
                began = max(at for at in launched if at is not None)
                busy_until = max(busy_until, began) + delivery.seconds
                while (left := busy_until - time.perf_counter()) > 0:
                    time.sleep(left)
                error = None
            except Exception as raised:
                error = raised
            delivery.done.set_result(error)
            del delivery  # and with it the tensors, which nobody should have to wait for


def _launch_time(log: FileIO, number: int) -> float | None:
    log.seek(number * _TIME.size)
    written = log.read(_TIME.size)
    return _TIME.unpack(written)[0] if len(written) == _TIME.size else None


def _open_logs(group: dist.ProcessGroup) -> tuple[FileIO, list[FileIO]]:
    """This rank's own file of launch times, to append to, and those of all ranks, to read."""
    rank, size = group.rank(), group.size()
    folder = [tempfile.mkdtemp(prefix="labkit-slow-link-") if rank == 0 else ""]
    dist.broadcast_object_list(folder, group=group, group_src=0)
    paths = [Path(folder[0], str(other)) for other in range(size)]
    here = os.path.isdir(folder[0])
    everywhere: list[Any] = [None] * size
    own = FileIO(paths[rank], "a") if here else None
    dist.all_gather_object(everywhere, here, group=group)
    logs = [FileIO(path) for path in paths] if all(everywhere) else []
    dist.barrier(group)
    if rank == 0:
        # What is open stays readable; where open files cannot go (Windows), they stay behind.
        shutil.rmtree(folder[0], ignore_errors=True)
    if own is None or not logs:
        if own is not None:
            own.close()
        raise RuntimeError(
            f"rank(s) {[r for r, found in enumerate(everywhere) if not found]} cannot see the "
            f"folder {folder[0]} of rank 0. A slow link is for ranks on one machine; between "
            "machines there is a real one."
        )
    return own, logs


def _stop(deliveries: SimpleQueue[_Delivery | None], wire: threading.Thread, log: FileIO) -> None:
    deliveries.put(None)
    log.close()
    if wire is not threading.current_thread():  # where the garbage collector may have come by
        wire.join(timeout=5)
