"""A process group around another one, which sees every collective that passes through it.

Pass `WrappedGroup(inner)` as the `process_group` of any class that averages gradients. It calls
`inner` for every collective, through the method `carry`. A subclass overrides `carry` to record the
collective (`labkit.profiling.recording`) or to delay it (`labkit.profiling.slow_link`). Wrappers
can be nested.

Why a process group: it is the only public interface that sees both the launch of a collective and
its handle, from Python (`dist.all_reduce(…, group=…)`) and from the C++ reducer of torch's
DistributedDataParallel. A dispatch mode (`labkit.testing.watch`) sees the launches of every group
but not their completion. A communication hook sees buckets only, and only in classes with hooks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils._pytree import tree_leaves

_NO_MESSAGES = (
    "{kind} passes collectives on, and was asked to {what}. Give point-to-point messages the "
    "process group that it wraps, or none."
)


class WrappedGroup(dist.ProcessGroup):
    """Passes every collective to `inner` (default: the default group); a base class.

    Raises NotImplementedError for a point-to-point message, because it could not see its
    completion.
    """

    def __init__(self, inner: dist.ProcessGroup | None = None) -> None:
        self.inner = inner or dist.group.WORLD
        super().__init__(self.inner.rank(), self.inner.size())

    # Where `torch.distributed` looks a group up (its ranks, its backend), this is the one that it
    # wraps. Unknown to it, `dist` functions would turn every error into one about just that.

    def __eq__(self, other: object) -> bool:
        return other is self or self.inner == other

    def __hash__(self) -> int:
        return hash(self.inner)

    def carry(self, op: str, tensors: Sequence[Tensor], launch: Callable[[], dist.Work]) -> Any:
        """Launch one collective and return its handle.

        `op` is its name in `torch.distributed`; `tensors` are this rank's inputs.
        """
        return launch()

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        return self._pass("all_reduce", tensors, self.inner.allreduce, tensors, *options)

    def allreduce_coalesced(self, tensors: Any, *options: Any) -> Any:
        return self._pass("all_reduce", tensors, self.inner.allreduce_coalesced, tensors, *options)

    def broadcast(self, tensors: Any, *options: Any) -> Any:
        return self._pass("broadcast", tensors, self.inner.broadcast, tensors, *options)

    def reduce(self, tensors: Any, *options: Any) -> Any:
        return self._pass("reduce", tensors, self.inner.reduce, tensors, *options)

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return self._pass("all_gather", inputs, self.inner.allgather, outputs, inputs, *options)

    def all_gather_single(self, output: Any, mine: Any, *options: Any) -> Any:
        inner = self.inner.all_gather_single
        return self._pass("all_gather", mine, inner, output, mine, *options)

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        inner = self.inner.reduce_scatter
        return self._pass("reduce_scatter", inputs, inner, outputs, inputs, *options)

    def reduce_scatter_single(self, output: Any, mine: Any, *options: Any) -> Any:
        inner = self.inner.reduce_scatter_single
        return self._pass("reduce_scatter", mine, inner, output, mine, *options)

    def alltoall(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return self._pass("all_to_all", inputs, self.inner.alltoall, outputs, inputs, *options)

    def all_to_all_single(self, output: Any, mine: Any, *options: Any) -> Any:
        inner = self.inner.all_to_all_single
        return self._pass("all_to_all", mine, inner, output, mine, *options)

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return self._pass("gather", inputs, self.inner.gather, outputs, inputs, *options)

    def scatter(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return self._pass("scatter", inputs, self.inner.scatter, outputs, inputs, *options)

    def barrier(self, opts: Any = None) -> Any:
        return self._pass("barrier", (), self.inner.barrier, opts or dist.BarrierOptions())

    def send(self, *message: Any) -> Any:
        raise NotImplementedError(_NO_MESSAGES.format(kind=type(self).__name__, what="send"))

    def recv(self, *message: Any) -> Any:
        raise NotImplementedError(_NO_MESSAGES.format(kind=type(self).__name__, what="receive"))

    def recv_anysource(self, *message: Any) -> Any:
        return self.recv(*message)

    def getBackendName(self) -> str:  # noqa: N802, the name that torch asks for
        # Of a group that calls itself gloo, DDP's logger expects that it *is* torch's own.
        return f"wrapped {self.inner.name()}"

    def _pass(self, op: str, tensors: Any, call: Callable[..., Any], *args: Any) -> Any:
        brought = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        return self.carry(op, brought, lambda: call(*args))


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """The total size of `tensors`, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def future_of(work: dist.Work) -> Future | None:
    """The future of a handle; None if its backend has none (gloo's reduce-scatter)."""
    try:
        return work.get_future()
    except RuntimeError:
        return None
