"""A process group around another one, which sees every collective that passes through it.

Pass `WrappedGroup(inner)` as the `process_group` of any class that averages gradients. It calls
`inner` for every collective, through `pass_on`. A subclass overrides that to record the collective
(`labkit.profiling.recording`) or to delay it (`labkit.profiling.slow_link`). Wrappers can nest.

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

# By method: the name in `torch.distributed`, and which argument holds this rank's inputs.
_COLLECTIVES = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
}
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

    def pass_on(self, op: str, tensors: Sequence[Tensor], launch: Callable[[], dist.Work]) -> Any:
        """Launch one collective and return its handle.

        `op` is its name in `torch.distributed`; `tensors` are this rank's inputs.
        """
        return launch()

    def barrier(self, opts: Any = None) -> Any:
        return self.pass_on(
            "barrier", (), lambda: self.inner.barrier(opts or dist.BarrierOptions())
        )

    def send(self, *message: Any) -> Any:
        raise NotImplementedError(_NO_MESSAGES.format(kind=type(self).__name__, what="send"))

    def recv(self, *message: Any) -> Any:
        raise NotImplementedError(_NO_MESSAGES.format(kind=type(self).__name__, what="receive"))

    def recv_anysource(self, *message: Any) -> Any:
        return self.recv(*message)

    def getBackendName(self) -> str:  # noqa: N802, the name that torch asks for
        # Of a group that calls itself gloo, DDP's logger expects that it *is* torch's own.
        return f"wrapped {self.inner.name()}"


def _passed_on(method: str, op: str, inputs: int) -> Callable[..., Any]:
    def collective(self: WrappedGroup, *args: Any) -> Any:
        brought = [leaf for leaf in tree_leaves(args[inputs]) if isinstance(leaf, Tensor)]
        return self.pass_on(op, brought, lambda: getattr(self.inner, method)(*args))

    return collective


for _method, (_op, _inputs) in _COLLECTIVES.items():
    setattr(WrappedGroup, _method, _passed_on(_method, _op, _inputs))


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """The total size of `tensors`, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def future_of(work: dist.Work) -> Future | None:
    """The future of a handle; None if its backend has none (gloo's reduce-scatter)."""
    try:
        return work.get_future()
    except RuntimeError:
        return None
