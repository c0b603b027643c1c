"""torch.distributed over the trusted side: a rank's only way to the other ranks.

A rank has one connection, to the trusted side, and no other way to reach a rank. So the trusted
side knows which rank launched which collective, when, and with what. It adds the tensors up itself,
and it sees a deadlock as soon as it happens.

To a solution it is torch.distributed over gloo. The process group takes the place of
`ProcessGroupGloo`, so `dist.get_backend()` says "gloo". Subgroups, device meshes, object
collectives and functional collectives use it like the original. It accepts the dtypes that gloo
accepts, and raises RuntimeError for the others. It does more than gloo in torch 2.13 in three ways:

- tensors that are not contiguous are reduced by their elements; gloo reduces the memory that they
  begin in;
- all_to_all takes tensors of different sizes;
- all_gather_into_tensor stacks.

`Gate` is a place in backward. When backward reaches it, the rank tells the trusted side and waits
for numbers, by which the gradient of everything before the gate is multiplied. Nobody can know the
gradients behind a gate without having opened it, so what was launched before a gate was opened was
launched before backward had passed it. The numbers differ from element to element: a factor common
to all could be multiplied in later.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grader.inside.wire import BFLOAT16, Channel

_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_BITWISE = ("BAND", "BOR", "BXOR")
_INTEGERS = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Expected(torch.futures.Future):
    """A future that says when the rank's own thread stands waiting for it.

    By that the trusted side can tell a deadlock from a long computation. A thread that the solution
    has started may wait while the rank goes on, so it says nothing.
    """

    def __init__(self, number: int, link: "Link") -> None:
        super().__init__()
        self._number = number
        self._link = link

    def wait(self) -> Any:
        if not self.done() and threading.current_thread() is threading.main_thread():
            self._link.tell({"kind": "waits", "for": self._number})
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future], Any]) -> "Expected":
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

    def __init__(self, number: int, into: list[Tensor], link: "Link") -> None:
        super().__init__(number, link)
        self._into = into
        self.message: dict[str, Any] = {}
        self.error: Exception | None = None

    def arrive(self, message: dict[str, Any]) -> None:
        """Write the answer and wake who waits. Whatever goes wrong is raised by `wait`."""
        self.message = message
        try:
            if "failed" in message:
                raise RuntimeError(message["failed"])
            values = message.get("tensors", [])
            if self._into and len(values) != len(self._into):
                raise RuntimeError(f"{len(values)} tensors arrived for {len(self._into)}")
            for tensor, value in zip(self._into, values, strict=False):
                _write(tensor, value)
        except Exception as error:
            self.error = error
            self.set_exception(error)
        else:
            self.set_result(self._into)


class RoutedWork(dist.Work):
    """The handle of one collective."""

    def __init__(self, answer: Answer, group: "RoutedGroup | None" = None) -> None:
        super().__init__()
        self._answer = answer
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._answer.wait()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._answer.done()

    def is_success(self) -> bool:
        return self._answer.done() and self._answer.error is None

    def exception(self) -> Exception | None:
        return self._answer.error

    def result(self) -> list[Tensor]:
        return self._answer.wait()

    def get_future(self) -> Answer:
        return self._answer

    def source_rank(self) -> int:
        """Of a message received from any rank: its sender, as a rank of the group."""
        return self._group.members.index(self._answer.message["source"])

    _source_rank = source_rank


class RoutedGroup(dist.ProcessGroup):
    """A process group whose collectives the trusted side carries out.

    torch constructs it where it would construct ProcessGroupGloo, and then writes the members and
    the group's name into `options`.
    """

    link: "Link"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any = None) -> None:
        super().__init__(rank, size)
        self.options = SimpleNamespace(global_ranks_in_group=[], group_name="")
        self._group_name = self._group_desc = ""

    @property
    def members(self) -> list[int]:
        """The ranks of all ranks' group that belong to this one."""
        return list(self.options.global_ranks_in_group) or list(range(self.size()))

    # What torch calls from C++ keeps torch's names.
    def getBackendName(self) -> str:  # noqa: N802
        return "routed"  # of "gloo" DDP's logger needs the C++ class

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._group_desc = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def _get_backend(self, device: Any) -> "RoutedGroup":
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Numbers are given by the link."""

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        return False

    def _launch(self, op: str, sent: list[Tensor], into: list[Tensor], **more: Any) -> RoutedWork:
        for tensor in [*sent, *into]:
            _look_at_dtype(tensor)
        if "root" in more and not 0 <= more["root"] < self.size():
            raise RuntimeError(f"{op}: invalid root rank: {more['root']}")
        message = {
            "kind": "collective",
            "op": op,
            "group": self._group_name,
            "members": self.members,
            "tensors": [_bits(tensor) for tensor in sent],
            **more,
        }
        return RoutedWork(self.link.ask(message, into), self)

    def _reducing(self, op: str, sent: list[Tensor], into: list[Tensor], opts, **more):
        reduce = _name(opts.reduceOp) if opts is not None else "SUM"
        for tensor in sent:
            if reduce in _BITWISE and tensor.dtype not in _INTEGERS:
                raise RuntimeError(f"Cannot use ReduceOp.{reduce} with non-integral dtype")
            if reduce == "AVG" and tensor.dtype not in _FLOATS:
                raise RuntimeError(f"the average of {tensor.dtype} is no {tensor.dtype}")
        return self._launch(op, sent, into, reduce=reduce, **more)

    def allreduce(self, tensors, opts=None):
        return self._reducing("all_reduce", tensors, tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors, opts):
        root = opts.rootRank
        sent = tensors if self.rank() == root else []
        return self._launch("broadcast", sent, tensors, root=root, expects=_sizes(tensors))

    def reduce(self, tensors, opts):
        into = tensors if self.rank() == opts.rootRank else []
        return self._reducing("reduce", tensors, into, opts, root=opts.rootRank)

    def allgather(self, outputs, inputs, opts=None):
        if len(outputs) != 1 or len(inputs) != 1:
            raise RuntimeError("all_gather: one list of outputs and one input are wanted")
        _look_at_sizes("all_gather", outputs[0], inputs * self.size())
        return self._launch("all_gather", inputs, outputs[0])

    def _allgather_base(self, output, given, opts=None):
        return self.all_gather_single_coalesced([output], [given])

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        into = []
        for output, given in zip(outputs, inputs, strict=True):
            into.append(_parts("all_gather", output, given, self.size()))
        # The trusted side answers rank by rank.
        ordered = [parts[rank] for rank in range(self.size()) for parts in into]
        return self._launch("all_gather", inputs, ordered)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs, inputs, opts=None):
        _look_at_sizes("all_gather", [t for own in outputs for t in own], inputs * self.size())
        return self._launch("all_gather", inputs, [tensor for own in outputs for tensor in own])

    def reduce_scatter(self, outputs, inputs, opts=None):
        if len(outputs) != 1 or len(inputs) != 1 or len(inputs[0]) != self.size():
            raise RuntimeError("reduce_scatter: one output and an input for each rank are wanted")
        _look_at_sizes("reduce_scatter", [outputs[0]], [inputs[0][self.rank()]])
        return self._reducing("reduce_scatter", inputs[0], outputs, opts)

    def _reduce_scatter_base(self, output, given, opts=None):
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        sent = []
        for output, given in zip(outputs, inputs, strict=True):
            sent.append(_parts("reduce_scatter", given, output, self.size()))
        ordered = [parts[rank] for rank in range(self.size()) for parts in sent]
        return self._reducing("reduce_scatter", ordered, list(outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs, inputs, opts):
        into = outputs[0] if self.rank() == opts.rootRank else []
        if into:
            _look_at_sizes("gather", into, inputs * self.size())
        return self._launch("gather", inputs, into, root=opts.rootRank)

    def scatter(self, outputs, inputs, opts):
        sent = inputs[0] if self.rank() == opts.rootRank else []
        if sent:
            _look_at_sizes("scatter", sent, outputs * self.size())
        expects = _sizes(outputs)
        return self._launch("scatter", sent, outputs, root=opts.rootRank, expects=expects)

    def alltoall(self, outputs, inputs, opts=None):
        if len(inputs) != self.size() or len(outputs) != self.size():
            raise RuntimeError("all_to_all: an input and an output for each rank are wanted")
        return self._launch("all_to_all", inputs, outputs, expects=_sizes(outputs))

    def alltoall_base(self, output, given, output_sizes, input_sizes, opts=None):
        return self.alltoall(
            _rows(output, output_sizes, self.size()), _rows(given, input_sizes, self.size())
        )

    all_to_all_single = alltoall_base

    def barrier(self, opts=None):
        return self._launch("barrier", [], [])

    def monitored_barrier(self, timeout=None, wait_all_ranks=False) -> None:
        self.barrier().wait()

    def send(self, tensors, to, tag=0):
        return self._launch("send", tensors, [], peer=self.members[to], tag=tag)

    def recv(self, tensors, source, tag=0):
        peer, expects = self.members[source], _sizes(tensors)
        return self._launch("recv", [], tensors, peer=peer, tag=tag, expects=expects)

    def recv_anysource(self, tensors, tag=0):
        return self._launch("recv", [], tensors, peer=None, tag=tag, expects=_sizes(tensors))

    def abort(self) -> None:
        """Nothing to give back: the connection belongs to the rank."""

    shutdown = abort


class RoutedStore(dist.Store):
    """The key-value store of all ranks, kept by the trusted side."""

    def __init__(self, link: "Link") -> None:
        super().__init__()
        self._link = link

    def _ask(self, op: str, keys: list[str], value: bytes = b"", number: int = 0) -> dict:
        data = np.frombuffer(value, "uint8")
        message = {"kind": "store", "op": op, "keys": keys, "value": data, "amount": number}
        answer = self._link.ask(message, [])
        answer.wait()
        return answer.message

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", [key], _as_bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", [key])["value"].tobytes()

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], number=amount)["amount"]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", list(keys))["amount"])

    def deleteKey(self, key: str) -> bool:  # noqa: N802 (torch calls it by this name)
        return bool(self._ask("delete", [key])["amount"])

    def getNumKeys(self) -> int:  # noqa: N802
        return self._ask("count", [])["amount"]


def _as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _name(op: Any) -> str:
    for name in _REDUCTIONS:
        if op == getattr(dist.ReduceOp, name):
            return name
    raise RuntimeError(f"ReduceOp {op} is not supported")


def _sizes(tensors: list[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _look_at_dtype(tensor: Tensor) -> None:
    if tensor.dtype not in _INTEGERS | _FLOATS:
        raise RuntimeError(f"Invalid scalar type: gloo has no collectives of {tensor.dtype}")


def _look_at_sizes(op: str, many: list[Tensor], wanted: list[Tensor]) -> None:
    if [(t.numel(), t.dtype) for t in many] != [(t.numel(), t.dtype) for t in wanted]:
        raise RuntimeError(f"{op}: invalid tensor size or type")


def _parts(op: str, whole: Tensor, part: Tensor, size: int) -> list[Tensor]:
    """`whole` in `size` parts of as many elements as `part`, whatever its shape."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise RuntimeError(f"{op}: invalid tensor size or type")
    if not whole.is_contiguous():
        raise RuntimeError(f"{op}: the tensor of all ranks has to be contiguous")
    return list(whole.detach().view(-1).chunk(size)) if part.numel() else [part] * size


def _rows(tensor: Tensor, sizes: list[int], size: int) -> list[Tensor]:
    if not sizes:
        if tensor.dim() == 0 or tensor.size(0) % size:
            raise RuntimeError("all_to_all: the tensor cannot be cut into equal parts")
        sizes = [tensor.size(0) // size] * size
    if len(sizes) != size or sum(sizes) != tensor.size(0):
        raise RuntimeError("all_to_all: the sizes do not add up to the tensor's")
    return list(tensor.detach().split(list(sizes)))


def _bits(tensor: Tensor) -> np.ndarray:
    """The tensor's elements, copied, as an array that the wire knows."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return np.array(tensor.numpy())


def _write(tensor: Tensor, value: np.ndarray) -> None:
    """Put `value` into `tensor`, whatever autograd thinks of it: gloo does not ask it either."""
    if value.size != tensor.numel():
        raise RuntimeError(f"{value.size} elements arrived for a tensor of {tensor.numel()}")
    if value.dtype == BFLOAT16:
        arrived = torch.from_numpy(value.view("int16")).view(torch.bfloat16)
    else:
        arrived = torch.from_numpy(value)
    arrived = arrived.reshape(tensor.shape)
    if arrived.dtype != tensor.dtype:
        raise RuntimeError(f"{arrived.dtype} arrived for a tensor of {tensor.dtype}")
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        target = tensor.detach()
        if target.is_sparse:
            tensor.copy_(arrived.to_sparse())
        else:
            # An expanded tensor refers to one element many times; each of them is the same.
            for dimension, stride in enumerate(target.stride()):
                if stride == 0 and target.size(dimension) > 1:
                    target = target.narrow(dimension, 0, 1)
                    arrived = arrived.narrow(dimension, 0, 1)
            target.copy_(arrived)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, name: str, link: "Link") -> Tensor:
        ctx.name, ctx.link = name, link
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        answer = ctx.link.ask({"kind": "gate", "name": ctx.name}, [])
        answer.wait()
        return gradient * factor_of(answer.message["factor"]), None, None


def factor_of(factor: float | np.ndarray) -> float | Tensor:
    """What a gate multiplies by: one number, or one for each feature."""
    return torch.from_numpy(factor) if isinstance(factor, np.ndarray) else factor


class Link:
    """A rank's connection: sends requests, completes them as the answers arrive."""

    def __init__(self, channel: Channel, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._channel = channel
        self._lock = threading.Lock()
        self._unanswered: dict[int, Answer] = {}
        self._count = 0
        self._calls: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def join(self) -> None:
        """Make this link gloo, and all ranks the default process group of this process."""

        class Group(RoutedGroup):
            link = self

        Group.__name__ = Group.__qualname__ = "ProcessGroupGloo"
        # The one place at which torch makes a gloo group; there is no public way to be it.
        dist.distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo = Group
        # Kept: torch's C++ side calls a store written in Python only while Python has it, too.
        self._store = RoutedStore(self)
        dist.init_process_group(
            "gloo", store=self._store, rank=self.rank, world_size=self.world_size
        )

    def gate(self, value: Tensor, name: str) -> Tensor:
        """`value`, unchanged; backward asks the trusted side before it goes on."""
        return _Gate.apply(value, name, self)

    def call(self, step: str, number: int, value: Any) -> Any:
        """Have an implementation do `step` on all ranks, in a process that is not this one."""
        message = {"kind": "collective", "op": "call", "group": "", "step": step}
        message |= {"members": list(range(self.world_size)), "which": number, "value": value}
        answer = self.ask({**message, "tensors": []}, [])
        answer.wait()
        return answer.message["value"]

    def calls(self) -> dict[str, Any] | None:
        """The next call of an implementation that this process runs; None at the end."""
        return self._calls.get()

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
            if "number" not in message:
                self._calls.put(message)
                continue
            with self._lock:
                answer = self._unanswered.pop(message["number"])
            answer.arrive(message)
        self._calls.put(None)
