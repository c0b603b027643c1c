"""A torch.distributed backend whose every message goes through the trusted side.

A rank has one connection, to the trusted side, and no other way to reach a rank. So the trusted
side knows, and need not be told, which collective was launched when, by whom and with what; it adds
the tensors up itself; and it sees a deadlock the moment it happens.

To a solution it is torch.distributed as ever: `dist.all_reduce`, `async_op=True`, `Work.wait()`,
`Work.get_future()`, point-to-point messages, torch's own DistributedDataParallel.

`Gate` is a place in backward. When backward reaches it, the rank tells the trusted side and waits
for a number, by which the gradient of everything before the gate is multiplied. Nobody can know the
gradients behind a gate without having opened it, so what was launched before a gate was opened was
launched before backward had passed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grader.inside.wire import Channel

BACKEND = "routed"
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Expected(torch.futures.Future):
    """A future that says when somebody stands waiting for it.

    By that the trusted side can tell a deadlock from a long computation.
    """

    def __init__(self, number: int, link: Link) -> None:
        super().__init__()
        self._number = number
        self._link = link

    def wait(self) -> Any:
        if not self.done():
            self._link.tell({"kind": "waits", "for": self._number})
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future], Any]) -> Expected:
        later = Expected(self._number, self._link)

        def go_on(done: torch.futures.Future) -> None:
            try:
                later.set_result(callback(done))
            except Exception as error:
                later.set_exception(error)

        self.add_done_callback(go_on)
        return later


class Answer(Expected):
    """The answer to one request: a future of the tensors that it is written into."""

    def __init__(self, number: int, into: list[Tensor], link: Link) -> None:
        super().__init__(number, link)
        self._into = into
        self.message: dict[str, Any] = {}

    def wait(self) -> list[Tensor]:
        super().wait()
        if "failed" in self.message:
            raise RuntimeError(self.message["failed"])
        return self._into

    def arrive(self, message: dict[str, Any]) -> None:
        self.message = message
        with torch.no_grad():
            for tensor, value in zip(self._into, message.get("tensors", []), strict=False):
                tensor.copy_(torch.from_numpy(value).view_as(tensor))
        self.set_result(self._into)


class RoutedWork(dist.Work):
    """The handle of one collective."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._answer.wait()
        return True

    def is_completed(self) -> bool:
        return self._answer.done()

    def get_future(self) -> Answer:
        return self._answer


class RoutedGroup(dist.ProcessGroup):
    """The process group of all ranks."""

    def __init__(self, link: Link) -> None:
        super().__init__(link.rank, link.world_size)
        self._link = link

    def getBackendName(self) -> str:  # noqa: N802 (torch calls it by this name)
        return BACKEND

    def _launch(self, op: str, sent: list[Tensor], into: list[Tensor], **more: Any) -> RoutedWork:
        tensors = [tensor.detach().contiguous().numpy() for tensor in sent]
        message = {"kind": "collective", "op": op, "tensors": tensors, **more}
        return RoutedWork(self._link.ask(message, into))

    def allreduce(self, tensors, options=None):
        reduce = _name(options.reduceOp) if options is not None else "SUM"
        return self._launch("all_reduce", tensors, tensors, reduce=reduce)

    def allreduce_coalesced(self, tensors, options=None):
        return self.allreduce(tensors, options)

    def broadcast(self, tensors, options):
        return self._launch("broadcast", tensors, tensors, root=options.rootRank)

    def reduce(self, tensors, options):
        into = tensors if self.rank() == options.rootRank else []
        return self._launch(
            "reduce", tensors, into, root=options.rootRank, reduce=_name(options.reduceOp)
        )

    def allgather(self, outputs, inputs, options=None):
        return self._launch("all_gather", inputs, outputs[0])

    def _allgather_base(self, output, given, options=None):
        return self._launch("all_gather", [given], list(output.chunk(self.size())))

    def reduce_scatter(self, outputs, inputs, options):
        return self._launch("reduce_scatter", inputs[0], outputs, reduce=_name(options.reduceOp))

    def _reduce_scatter_base(self, output, given, options):
        parts = list(given.chunk(self.size()))
        return self._launch("reduce_scatter", parts, [output], reduce=_name(options.reduceOp))

    def gather(self, outputs, inputs, options):
        into = outputs[0] if self.rank() == options.rootRank else []
        return self._launch("gather", inputs, into, root=options.rootRank)

    def scatter(self, outputs, inputs, options):
        sent = inputs[0] if self.rank() == options.rootRank else []
        return self._launch("scatter", sent, outputs, root=options.rootRank)

    def barrier(self, options=None):
        return self._launch("barrier", [], [])

    def send(self, tensors, to, tag=0):
        return self._launch("send", tensors, [], peer=to, tag=tag)

    def recv(self, tensors, source, tag=0):
        return self._launch("recv", [], tensors, peer=source, tag=tag)


def _name(op: Any) -> str:
    return next(name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, name: str, link: Link) -> Tensor:
        ctx.name, ctx.link = name, link
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        answer = ctx.link.ask({"kind": "gate", "name": ctx.name}, [])
        answer.wait()
        return gradient * answer.message["factor"], None, None


class Link:
    """A rank's connection: sends requests, completes them as the answers arrive."""

    def __init__(self, channel: Channel, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._channel = channel
        self._lock = threading.Lock()
        self._unanswered: dict[int, Answer] = {}
        self._count = 0
        threading.Thread(target=self._read, daemon=True).start()

    def join(self) -> None:
        """Make the routed group the default process group of this process."""

        def create(store, rank, world_size, timeout):
            return RoutedGroup(self)

        dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
        dist.init_process_group(
            BACKEND, store=dist.HashStore(), rank=self.rank, world_size=self.world_size
        )

    def gate(self, value: Tensor, name: str) -> Tensor:
        """`value`, unchanged; backward asks the trusted side before it goes on."""
        return _Gate.apply(value, name, self)

    def ask(self, message: dict[str, Any], into: list[Tensor]) -> Answer:
        """Send `message`; the answer will be written into the tensors of `into`."""
        with self._lock:
            answer = Answer(self._count, into, self)
            self._unanswered[self._count] = answer
            self._channel.send({**message, "number": self._count})
            self._count += 1
        return answer

    def tell(self, message: dict[str, Any]) -> None:
        """Send `message`, to which no answer comes."""
        with self._lock:
            self._channel.send(message)

    def _read(self) -> None:
        while (message := self._channel.receive()) is not None:
            with self._lock:
                answer = self._unanswered.pop(message["number"])
            answer.arrive(message)
