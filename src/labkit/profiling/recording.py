"""Record one step: when each gradient was ready and when each collective ran, on every rank.

    recorder = Recorder(module)                              # on each rank, before the next line
    averager = DistributedDataParallel(module, process_group=recorder)
    with recorder:
        averager(inputs).sum().backward()
    recording = recorder.gather()                            # or `merge` what the ranks returned

The `averager` may be anything that takes a process group: torch's DistributedDataParallel, a
rung of `miniddp.ladder`, or a reader's own class. The recorder uses two public interfaces:

- A post-accumulate-grad hook on every parameter records when its gradient is ready. Hooks run in
  the order of their registration, so create the recorder before the averager.
- The recorder is itself a process group around another (`labkit.profiling.wrapped_group`). Every
  collective passes through it at launch, and the future of its handle gives the time of
  completion.

Times are seconds of `time.perf_counter`, a clock that all processes of one machine share. They
differ in every run; `order()` is the same in every run and may be printed and compared. It costs a
few microseconds per gradient and per collective. Under CUDA, the times are those at which the host
queued the work.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from labkit.profiling.wrapped_group import WrappedGroup, bytes_of, future_of

_PATIENCE = 60.0


class Gradient(NamedTuple):
    """One parameter's gradient: its size in bytes, and when backward had accumulated it."""

    parameter: str
    bytes: int
    ready: float


class Collective(NamedTuple):
    """One collective, as one rank saw it."""

    op: str
    bytes: int  # of this rank's input
    after: int  # the number of gradients that were ready at the launch
    bucket: int | None  # its number among those launched after the first gradient
    launched: float
    done: float


class OrderEntry(NamedTuple):
    """The part of a `Collective` that is the same in every run."""

    op: str
    bytes: int
    after: int


@dataclass(frozen=True)
class RankRecording:
    """One rank's step: `forwards` are (begin, end); everything else is in order of time."""

    rank: int
    begin: float
    end: float
    forwards: tuple[tuple[float, float], ...]
    gradients: tuple[Gradient, ...]
    collectives: tuple[Collective, ...]

    def order(self) -> list[OrderEntry]:
        """The collectives in launch order, without times."""
        return [OrderEntry(one.op, one.bytes, one.after) for one in self.collectives]

    def buckets(self) -> list[Collective]:
        """The collectives launched after the first gradient was ready: those that carry gradients.

        A forward's broadcasts of buffers or bucket plans are not among them.
        """
        return [one for one in self.collectives if one.bucket is not None]

    def overlaps(self) -> bool:
        """Whether the first bucket was launched before the last gradient was ready."""
        return any(one.after < len(self.gradients) for one in self.buckets())

    def compute_end(self) -> float:
        """When the last gradient was ready."""
        return self.gradients[-1].ready if self.gradients else self.end

    def exposed(self) -> list[tuple[float, float]]:
        """The times after the last gradient in which a collective was in flight, as (begin, end).

        This is the communication that backward does not hide. On an early rank it includes the
        wait for late ranks.
        """
        covered = self.compute_end()
        spans: list[tuple[float, float]] = []
        for one in sorted(self.collectives, key=lambda one: one.launched):
            begin = max(one.launched, covered)
            if one.done <= begin:
                continue
            if spans and begin == spans[-1][1]:
                spans[-1] = (spans[-1][0], one.done)
            else:
                spans.append((begin, one.done))
            covered = one.done
        return spans

    def exposed_seconds(self) -> float:
        """The total length of `exposed()`."""
        return sum(end - begin for begin, end in self.exposed())

    def shifted(self, by: float) -> Self:
        """The same recording, `by` seconds later."""
        return replace(
            self,
            begin=self.begin + by,
            end=self.end + by,
            forwards=tuple((begin + by, end + by) for begin, end in self.forwards),
            gradients=tuple(g._replace(ready=g.ready + by) for g in self.gradients),
            collectives=tuple(
                c._replace(launched=c.launched + by, done=c.done + by) for c in self.collectives
            ),
        )


@dataclass(frozen=True)
class Recording:
    """The same step on all ranks, in rank order; times count from the start of the first rank."""

    ranks: tuple[RankRecording, ...]

    def order(self) -> list[list[OrderEntry]]:
        """`[rank]`: the collectives in launch order, without times; the same in every run."""
        return [one.order() for one in self.ranks]

    def same_order(self) -> bool:
        """Whether every rank launched the same collectives in the same order, as it must."""
        went = [[(launch.op, launch.bytes) for launch in order] for order in self.order()]
        return all(one == went[0] for one in went)

    def overlaps(self) -> bool:
        """Whether communication began before the last gradient was ready, on every rank."""
        return all(one.overlaps() for one in self.ranks)


def merge(ranks: Iterable[RankRecording]) -> Recording:
    """Combine the recordings of all ranks.

    Raises ValueError unless there is exactly one for each of the ranks 0, 1, ….
    """
    in_order = sorted(ranks, key=lambda one: one.rank)
    if not in_order or [one.rank for one in in_order] != list(range(len(in_order))):
        found = [one.rank for one in in_order]
        raise ValueError(
            f"expected one recording of each rank 0, 1, …, and got those of {found}. Return "
            "`recorder.recorded` from every rank, and merge all of them."
        )
    origin = min(one.begin for one in in_order)
    return Recording(tuple(one.shifted(-origin) for one in in_order))


class Recorder(WrappedGroup):
    """Records `module` on this rank within `with recorder:`.

    Args:
        module: the module itself, not the wrapper that averages its gradients.
        group: the process group for the collectives, for example a
            `labkit.profiling.slow_link.SlowLink`; None means the default group.

    A recording holds one forward and one backward. With gradient accumulation, record the last
    micro-batch. Each `with` block replaces the previous recording. It waits for the collectives
    that were launched in it, and raises TimeoutError if one is still in flight after a minute.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._running: _Running | None = None
        self._recorded: RankRecording | None = None
        self._handles = [
            module.register_forward_pre_hook(self._forward_begins),
            module.register_forward_hook(self._forward_ends),
        ]
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                hook = partial(self._gradient_is_ready, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    @property
    def recorded(self) -> RankRecording:
        """The last recording of this rank. Raises RuntimeError if there is none."""
        if self._recorded is None:
            raise RuntimeError(
                "nothing has been recorded: run a step within `with recorder:`, to its end"
            )
        return self._recorded

    def gather(self) -> Recording:
        """The recordings of all ranks, on every rank; every rank must call it."""
        every: list[Any] = [None] * self.inner.size()
        dist.all_gather_object(every, self.recorded, group=self.inner)
        return merge(every)

    def close(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        self._recorded = None
        self._running = _Running(time.perf_counter())
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        running, self._running = self._running, None
        if kind is None and running is not None:
            end = time.perf_counter()
            self._recorded = running.finished(self.rank(), end)

    def pass_on(self, op: str, tensors: Sequence[Tensor], launch: Callable[[], dist.Work]) -> Any:
        if self._running is None:
            return launch()
        under_way = _UnderWay(op, bytes_of(tensors), len(self._running.gradients))
        self._running.under_way.append(under_way)
        work = launch()
        if (future := future_of(work)) is not None:
            future.add_done_callback(under_way.ends)
        else:
            threading.Thread(target=under_way.wait_for, args=(work,), daemon=True).start()
        return work

    def _gradient_is_ready(self, name: str, parameter: Tensor) -> None:
        if self._running is not None:
            gradient = Gradient(name, bytes_of([parameter]), time.perf_counter())
            self._running.gradients.append(gradient)

    def _forward_begins(self, module: nn.Module, inputs: Any) -> None:
        if self._running is not None:
            self._running.forward_began = time.perf_counter()

    def _forward_ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._running is not None:
            span = (self._running.forward_began, time.perf_counter())
            self._running.forwards.append(span)


class _UnderWay:
    """A collective in flight; the thread that completes it records its end."""

    def __init__(self, op: str, nbytes: int, after: int) -> None:
        self.op, self.bytes, self.after = op, nbytes, after
        self.launched = time.perf_counter()
        self.done = threading.Event()
        self.end = 0.0

    def ends(self, future: Future | None = None) -> None:
        self.end = time.perf_counter()
        self.done.set()

    def wait_for(self, work: dist.Work) -> None:
        with suppress(RuntimeError):  # which is raised where the collective's caller waits, too
            work.wait()
        self.ends()

    def as_recorded(self, bucket: int | None) -> Collective:
        # Waiting threads wake up before callbacks run, so a moment may pass.
        if not self.done.wait(_PATIENCE):
            raise TimeoutError(
                f"{self.op} of {self.bytes} bytes is still under way {_PATIENCE:g} s after the "
                "recording's end. Wait for what was launched (`finish()`, or the handle's `wait`) "
                "within `with recorder:`, on every rank."
            )
        return Collective(self.op, self.bytes, self.after, bucket, self.launched, self.end)


class _Running:
    """A recording in progress."""

    def __init__(self, begin: float) -> None:
        self.begin = self.forward_began = begin
        self.forwards: list[tuple[float, float]] = []
        self.gradients: list[Gradient] = []
        self.under_way: list[_UnderWay] = []

    def finished(self, rank: int, end: float) -> RankRecording:
        early = sum(not one.after for one in self.under_way)  # and all others are buckets
        collectives = tuple(
            one.as_recorded(number - early if one.after else None)
            for number, one in enumerate(self.under_way)
        )
        end = max([end, *(one.done for one in collectives)])
        return RankRecording(
            rank, self.begin, end, tuple(self.forwards), tuple(self.gradients), collectives
        )
