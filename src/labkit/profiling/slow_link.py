"""A network of chosen bandwidth and latency, simulated in software on one machine.

    link = SlowLink(gbit_per_s=1, latency_us=50)             # on each rank
    averager = DistributedDataParallel(module, process_group=link)

Results stay bitwise equal. A collective completes no earlier than it would on such a network. The
model is a ring in which every rank sends and receives at full rate at once. An all-reduce of n
bytes over W ranks takes 2 (W-1) steps of n/W bytes:

    seconds = 2 (W-1) · (latency + (n/W) / bandwidth)

The time counts from the launch on the last rank or from the end of the previous collective,
whichever is later: collectives queue as on one wire. The launch returns at once, and backward
continues. A thread of the link waits for the real collective and then for the modeled time; only
then do the handle's `wait` and its future return. So the link is never faster than the machine
itself.

Ranks learn about each other's launches without messages. Each rank appends the time to a file
before the real collective, which cannot complete before all ranks have launched it. All ranks must
therefore run on one machine, where `time.perf_counter` is the same clock for all processes. The
link works on every system without special rights; tensors must be on the CPU.

Source for the costs: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 2005.
"""

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

from labkit.profiling.cost_model import Link
from labkit.profiling.wrapped_group import WrappedGroup, bytes_of, future_of

_TIME = struct.Struct("d")


def link_seconds(op: str, nbytes: int, world_size: int, link: Link) -> float:
    """The cost of one collective on a ring of `world_size` ranks, in seconds.

    Args:
        op: its name in `torch.distributed`: all_reduce, reduce_scatter, all_gather, all_to_all,
            broadcast, reduce, gather, or barrier.
        nbytes: the size of each rank's input.
        link: the latency of a step, and the rate at which one rank sends and receives at once.

    Raises NotImplementedError for any other `op`.
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
    return steps * link.latency + sent * link.seconds_per_byte


class SlowLink(WrappedGroup):
    """A process group that is as slow as a network. Every rank creates one, with equal arguments.

    Args:
        gbit_per_s: the rate at which each rank sends, in 10⁹ bit/s, and receives at the same time.
        latency_us: microseconds per step of the ring.
        group: the process group that carries the data; None means the default group.

    Raises:
        ValueError: the rate is not positive, or the latency is negative.
        RuntimeError: on every rank, if the ranks are not on one machine.
        NotImplementedError: at a launch with tensors that are not on the CPU, or of a collective
            without a cost here. The handle raises an error of the collective itself.

    Costs one thread and W + 1 open files until the object is deleted or closed, and about 0.1 ms
    per collective.
    """

    def __init__(
        self,
        gbit_per_s: float,
        latency_us: float = 50.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.link = Link.of(gbit_per_s, latency_us)
        super().__init__(group)
        self.launches = 0
        self._log, logs = _open_logs(self.inner)
        self._deliveries: SimpleQueue[_Delivery | None] = SimpleQueue()
        wire = threading.Thread(
            target=_deliver, args=(self._deliveries, logs), name="slow link", daemon=True
        )
        wire.start()
        self.close = weakref.finalize(self, _stop, self._deliveries, wire, self._log)

    def pass_on(self, op: str, tensors: Sequence[Tensor], launch: Callable[[], dist.Work]) -> Any:
        if elsewhere := [tensor.device for tensor in tensors if tensor.device.type != "cpu"]:
            raise NotImplementedError(
                f"a slow link carries tensors on the CPU and was given one on {elsewhere[0]}. "
                'Start the ranks with device="cpu".'
            )
        if not self.close.alive:
            raise RuntimeError("this slow link is closed; create another")
        seconds = link_seconds(op, bytes_of(tensors), self.size(), self.link)
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
    """The handle of a launch, for Python and for C++."""

    def __init__(self, delivery: _Delivery) -> None:
        super().__init__()
        self.done = delivery.done
        # An error set on a future from Python is a value to C++; one raised in `then` is an error.
        self.future = delivery.done.then(partial(_result, delivery.work))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result. `timeout` is not used: the collective has its group's timeout."""
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
    """The wire: deliver one collective after another, none before its time."""
    with contextlib.ExitStack() as open_logs:
        for log in logs:
            open_logs.enter_context(log)
        busy_until = 0.0
        while (delivery := deliveries.get()) is not None:
            try:
                delivery.work.wait()
                launched = [_launch_time(log, delivery.number) for log in logs]
                # A broadcast's root can finish before other ranks have launched theirs; then their
                # times are missing.
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
    """This rank's file of launch times, to append to, and the files of all ranks, to read."""
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
            f"folder {folder[0]} of rank 0. A slow link works for ranks on one machine; between "
            "machines, use the real network."
        )
    return own, logs


def _stop(deliveries: SimpleQueue[_Delivery | None], wire: threading.Thread, log: FileIO) -> None:
    deliveries.put(None)
    log.close()
    if wire is not threading.current_thread():  # where the garbage collector may have come by
        wire.join(timeout=5)
