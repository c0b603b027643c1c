"""CUDA's order of events on a CPU: which stream may see what, and a race where it is not said.

A GPU runs the operations of one stream in order, and those of two streams in any order, unless one
was made to wait for the other. `SimulatedStreams` keeps that book while everything runs on the CPU:
every operation counts as one on the current stream, and an access to memory that no chain of waits
orders after the last write is a race. So a wait that is missing in the code is found without a GPU,
at every run, and not only when a kernel happens to be slow.

The rules are those of vector clocks (Lamport 1978; Fidge 1988), as in `torch.cuda._sanitizer`. The
all-reduce is gloo's: it begins when the current stream has come so far, and its result is written
on the default stream.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miniddp.ddp import MiniDDP

WIDTH, STEPS = 6, 3


class RaceError(RuntimeError):
    """Two streams use the same memory, one of them writes, and neither waits for the other."""


class Stream:
    """As much of `torch.cuda.Stream` as decides on the order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {name: 0}
        """Of each stream, how many of its operations have ended before this one goes on."""

    def wait_stream(self, other: "Stream") -> None:
        """What is queued here from now on runs after all that is queued on `other` by now."""
        for name, count in other.seen.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

    def __repr__(self) -> str:
        return f"<stream {self.name}>"


class SimulatedStreams(TorchDispatchMode):
    """Inside of it every operation runs on `current`, and a race raises RaceError."""

    def __init__(self) -> None:
        super().__init__()
        self.default = self.current = Stream("default")
        self.uses: dict[int, list[tuple[str, int, str, bool]]] = {}
        """Of each memory, the last write and what was read since: stream, count, name, a write?"""

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Let operations run on `stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def in_place_of_cuda(self) -> Iterator[None]:
        """Let `torch.cuda` answer with these streams."""

        def current_stream(device: Any = None) -> Stream:
            return self.current

        with (
            mock.patch.object(torch.cuda, "current_stream", current_stream),
            mock.patch.object(torch.cuda, "default_stream", return_value=self.default),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
            mock.patch.object(Tensor, "record_stream"),
            mock.patch.object(Tensor, "is_cuda", new=property(_is_asked_by_miniddp)),
            self,
        ):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func)
        given = _tensors((args, kwargs))
        if func.namespace == "c10d":
            self._account(self.current, name, given, given)
            self.default.wait_stream(self.current)
            self._account(self.default, name, given, given)
            return result
        old = {_memory(tensor) for tensor in given}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(…) has made what it is given
            old = set()
        made = [tensor for tensor in _tensors(result) if _memory(tensor) not in old]
        for tensor in made:  # the allocator may hand out what a tensor before has left
            self.uses.pop(_memory(tensor), None)
        if func.is_view:
            return result
        written = _written(func, args, kwargs)
        if made or written:
            self._account(self.current, name, given, [*made, *written])
        return result

    def _account(
        self, stream: Stream, name: str, read: list[Tensor], written: list[Tensor]
    ) -> None:
        stream.seen[stream.name] += 1
        changed = {_memory(tensor) for tensor in written}
        for memory in {_memory(tensor) for tensor in read} | changed:
            writes, uses = memory in changed, self.uses.get(memory, [])
            for other, count, before, wrote in uses:
                if (writes or wrote) and stream.seen.get(other, 0) < count:
                    raise RaceError(
                        f"{name} on stream {stream.name} does not wait for {before} on stream "
                        f"{other}"
                    )
            use = (stream.name, stream.seen[stream.name], name, writes)
            self.uses[memory] = [use] if writes else [*uses, use]


class OnStream(torch.autograd.Function):
    """The identity. What comes before it in the forward runs its backward on a stream.

    As autograd does on a GPU, the stream first waits for the one that the gradient comes from.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Stream, streams: SimulatedStreams) -> Tensor:
        ctx.switch = (stream, streams, streams.current)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        stream, streams, caller = ctx.switch
        stream.wait_stream(caller)
        streams.current = stream
        return gradient, None, None


def backward(loss: Tensor, streams: SimulatedStreams, leaves: list[Stream]) -> None:
    """`loss.backward()`, ended as autograd ends it: the caller's stream waits for `leaves`."""
    caller = streams.current

    def end() -> None:
        for stream in leaves:
            caller.wait_stream(stream)
        streams.current = caller

    def begin(gradient: Tensor) -> None:
        # Queued first, so that it runs before what hooks will queue.
        torch.autograd.Variable._execution_engine.queue_callback(end)

    loss.register_hook(begin)
    loss.backward()


class TwoBranches(nn.Module):
    """Two layers; each one's gradients come on a stream of its own."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.streams, self.branches = streams, [Stream("first"), Stream("second")]

    def forward(self, x: Tensor) -> list[Tensor]:
        layers = zip((self.first, self.second), self.branches, strict=True)
        return [OnStream.apply(layer(x), stream, self.streams) for layer, stream in layers]


def train_two_branches(
    rank: int, views: bool = False, on_default: bool = False
) -> tuple[list[list[Tensor]], Tensor]:
    """On each rank: the gradients of STEPS steps, and the sum over its inputs.

    `on_default`: whether the caller's stream is the default one.

    Raises RaceError if one operation does not wait for another that it needs.
    """
    streams = SimulatedStreams()
    caller = streams.default if on_default else Stream("caller")
    torch.manual_seed(0)
    module = TwoBranches(streams)
    wrapped = MiniDDP(module, gradient_as_bucket_view=views)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    seen = []
    with streams.in_place_of_cuda(), streams.on(caller):
        caller.wait_stream(streams.default)
        for _ in range(STEPS):
            wrapped.zero_grad()
            loss = torch.stack([output.sum() for output in wrapped(x)]).sum()
            backward(loss, streams, module.branches)
            seen.append([parameter.grad.clone() for parameter in module.parameters()])
    return seen, x.sum(0)


def _is_asked_by_miniddp(tensor: Tensor) -> bool:
    """The answer to `is_cuda`: torch itself goes on as on a CPU."""
    return sys._getframe(1).f_globals["__name__"].startswith("miniddp")


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if not tensor.is_sparse else id(tensor)


def _written(func: Callable[..., Any], args: tuple, kwargs: dict) -> list[Tensor]:
    """The arguments that the operation changes, by its schema."""
    changed = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            changed += _tensors(given)
    return changed
