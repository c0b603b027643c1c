"""Watch the collectives that a piece of code launches, from Python or from C++.

`RecordedCollectives` records every collective in launch order. `SameCollectives` also checks that
every rank launches the same one. If two ranks are about to launch different collectives, which
would hang or mix up two tensors, it raises on every rank and names both.

Both see calls from Python (`torch.distributed.all_reduce`) and from C++ (the reducer of torch's
DistributedDataParallel). Every process group sends its calls through torch's dispatcher as
operators of the namespace `c10d`; `torch.distributed.tensor.debug.CommDebugMode` counts them
there, too. Point-to-point messages (send, recv) are not collectives and are ignored.

`late_collectives` carries out asynchronous collectives as late as possible: when they are waited
for. A fast connection has often sent a small tensor before the program's next line runs, so a
program that reads, overwrites, or frees the tensor too early seems to work. Within this context the
bug shows each time. Only calls written `torch.distributed.all_reduce(…)` are delayed, not those
from C++, as in torch's DistributedDataParallel.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any, NamedTuple, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("c10d", "_c10d_functional")
_NOT_COLLECTIVE = ("send", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd")
# To these every rank brings tensors of one shape; to a gather, a scatter or an all-to-all it need
# not.
_SAME_SHAPE_ON_ALL_RANKS = {
    *("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"),
    *("broadcast_", "broadcast", "reduce_"),
}
_DELAYED = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all_single"),
    *("all_gather_single", "all_gather_into_tensor"),
    *("reduce_scatter_single", "reduce_scatter_tensor"),
)
_MESSAGE_BYTES = 512
_all_gather = dist.all_gather  # not the one that `late_collectives` puts in its place


class CollectiveMismatchError(AssertionError):
    """The ranks differ in their collectives; `went[rank]` says what each was about to do."""

    def __init__(self, number: int, went: list[str]) -> None:
        super().__init__(number, went)
        self.number, self.went = number, went

    def __str__(self) -> str:
        said = "\n".join(f"  rank {rank}: {what}" for rank, what in enumerate(self.went))
        return (
            f"the ranks differ at collective number {self.number} (counted from 1):\n{said}\n"
            "Without this check they would hang, or mix up two tensors of one shape. Launch the "
            "same collectives in the same order on every rank, whatever each rank's data are."
        )


class LaunchedCollective(NamedTuple):
    """One collective, as this rank launched it."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.op} of {self.dtype} {', '.join(map(str, map(list, self.shapes)))}"


class RecordedCollectives(TorchDispatchMode):
    """`with RecordedCollectives() as watch: …` fills `watch.launched`, in launch order."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[LaunchedCollective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # First what is cheap: every operation of torch passes through here.
        if func.namespace in _NAMESPACES and func.overloadpacket.__name__ not in _NOT_COLLECTIVE:
            tensors = _tensors(args)
            launch = LaunchedCollective(
                func.overloadpacket.__name__,
                tuple(tuple(tensor.shape) for tensor in tensors),
                str(tensors[0].dtype).removeprefix("torch.") if tensors else "nothing",
                sum(_elements(tensor) * tensor.element_size() for tensor in tensors),
            )
            self.before(launch)
            self.launched.append(launch)
        return func(*args, **(kwargs or {}))

    def before(self, launch: LaunchedCollective) -> None:
        """Called just before each launch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks this. With True, the first operation would import torch._dynamo, for 1 s."""
        return False


class SameCollectives(RecordedCollectives):
    """Checks that collectives are the same on every rank; raises `CollectiveMismatchError`
    otherwise.

    Every rank must enter and leave it, once or several times. Before each launch, and at the end,
    each rank tells the others what it is about to do, or that it raised. This costs one all-gather
    of 512 bytes on a separate gloo group, so use it in tests.

    Collectives of smaller groups must also be the same on all ranks. A rank that reaches neither a
    collective nor the end within `timeout` seconds is reported. `close`, on every rank, releases
    the gloo group. With `late`, asynchronous collectives are carried out when they are waited for
    (`late_collectives`); `launched_late` holds those that are not yet.
    """

    def __init__(self, timeout: float = 20.0, late: bool = False) -> None:
        super().__init__()
        self._late = late_collectives if late else nullcontext
        self.side = dist.new_group(None, timedelta(seconds=timeout), backend="gloo")
        self.timeout = timeout
        self.mismatch: CollectiveMismatchError | None = None
        self.stuck = self.closed = False

    def before(self, launch: LaunchedCollective) -> None:
        comparable = launch.op in _SAME_SHAPE_ON_ALL_RANKS
        self._tell(f"is about to launch {launch if comparable else launch.op}")

    def __enter__(self) -> Self:
        self.mismatch = None
        self._delaying = self._late()
        self.launched_late = self._delaying.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._delaying.__exit__(None, None, None)
        if self.mismatch is not None:  # told to all; not to be swallowed by what is watched
            if kind is None:
                raise self.mismatch
            return
        if kind is None:
            self._tell("has come to the end")
        else:
            with suppress(CollectiveMismatchError):  # this rank's own exception goes first
                self._tell(f"raised {kind.__name__}: {error}")

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self.stuck:
            dist.barrier(self.side)  # nobody closes a connection on which another still reads
        dist.destroy_process_group(self.side)

    def _tell(self, what: str) -> None:
        if self.mismatch is not None:
            raise self.mismatch
        mine = what.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
        message = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        said = [torch.empty_like(message) for _ in range(self.side.size())]
        try:
            _all_gather(said, message, group=self.side)
        except RuntimeError:
            self.stuck = True
            went = ["?"] * self.side.size()
            went[self.side.rank()] = (
                f"{what}; a rank that is stuck or gone has not answered for {self.timeout:g} s"
            )
            self.mismatch = CollectiveMismatchError(len(self.launched) + 1, went)
            raise self.mismatch from None
        went = [one.numpy().tobytes().decode(errors="replace").rstrip() for one in said]
        if len({_compared(one) for one in went}) > 1:
            self.mismatch = CollectiveMismatchError(len(self.launched) + 1, went)
            raise self.mismatch


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _elements(tensor: torch.Tensor) -> int:
    """The elements of `tensor` in memory: an expanded one repeats them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride or not size)


def _compared(message: str) -> str:
    """Two ranks may raise the same exception in different words (each names itself)."""
    return message.partition(":")[0] if message.startswith("raised ") else message


# Late collectives ---------------------------------------------------------------------------------


class WrittenInFlightError(Exception):
    """A tensor was changed or freed between the launch of a collective and the wait for it."""


class LateWork:
    """In the place of a `Work`. Whatever it is asked for, all that was launched is carried out."""

    def __init__(self, queue: list["LateWork"], launch: Callable[[], Any], sent: Any) -> None:
        self._queue, self._launch, self._work = queue, launch, None
        self._sent = [(one, one.detach().clone()) for one in _tensors(sent)]
        queue.append(self)

    def __getattr__(self, name: str) -> Any:
        while self._work is None:
            (self._queue or [self])[0].carry_out()
        return getattr(self._work, name)

    def carry_out(self) -> None:
        """Launch it, and wait. Raises WrittenInFlightError. To be called in launch order."""
        self._queue[:1] = []
        if not all(_is_unchanged(*pair) for pair in self._sent):
            raise WrittenInFlightError(
                "a tensor that is sent was changed or freed between the collective's launch and "
                "the wait for it: wait first, or use another buffer"
            )
        self._work = self._launch()
        self._work.wait(timedelta(0))  # the next one may use the same tensor


@contextmanager
def late_collectives(check: bool = True) -> Iterator[list[LateWork]]:
    """Delay collectives with `async_op=True` in this context.

    Yields those that have been launched and not carried out. Every rank has to enter and leave;
    what is never waited for is never carried out. With `check`, a wait raises WrittenInFlightError
    if the tensors have changed; otherwise what they hold by then is sent.
    """
    queue: list[LateWork] = []
    with ExitStack() as patches:
        for name in _DELAYED:
            late = _delayed(getattr(dist, name), queue, check)
            patches.enter_context(mock.patch.object(dist, name, late))
        try:
            yield queue
        finally:
            queue.clear()


def _delayed(
    collective: Callable[..., Any], queue: list[LateWork], check: bool
) -> Callable[..., Any]:
    @wraps(collective)
    def launch(*args: Any, async_op: bool = False, **options: Any) -> Any:
        if async_op:
            again = partial(collective, *args, async_op=True, **options)
            return LateWork(queue, again, (args, options) if check else ())
        while queue:
            queue[0].carry_out()
        return collective(*args, **options)

    return launch


def _is_unchanged(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    if tensor.untyped_storage().nbytes() < before.numel() * before.element_size():
        return False
    same = (tensor == before) | ((tensor != tensor) & (before != before))
    return bool(same.all())
