"""The post office of a group of ranks: carries messages, adds up, writes down what it saw.

Every collective of a solution passes through here, because ranks have no other way to each other.
So `Seen` is not a report by the solution: it is what happened.

A collective is answered when all ranks of its group have launched theirs. Answers can be *held*
until backward has passed its last gate on every rank. A reducer that overlaps does not notice. One
that waits in the middle of backward stops there, and the router sees it stop.

Whatever a rank sends is read into exact types first (`_Fields`); what does not fit raises WireError
and costs that rank its check. Every message costs time proportional to its own size.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grader.inside.wire import BFLOAT16, WireError, dtype_name

_OPS = {"all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter"}
_OPS |= {"all_to_all", "barrier", "call"}
_WITHOUT_ALL = {"send", "recv"}
_REDUCING = {"all_reduce", "reduce", "reduce_scatter"}
_ROOTED = {"reduce", "broadcast", "gather", "scatter"}
_MOST_LAUNCHES = 5_000  # collectives of one rank
_MOST_TENSORS = 10_000  # of one collective
_MOST_HELD = 64 * 2**20  # bytes of a rank's tensors that wait for the other ranks
_MOST_KEYS, _LONGEST_KEY, _MOST_STORED = 1_000, 500, 2**16  # of the key-value store
_FOLD = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@dataclass(frozen=True)
class Launch:
    """One collective, or one half of a point-to-point message, as one rank launched it."""

    op: str  # "all_reduce", "broadcast", …, "send", "recv"
    numel: int  # elements of its tensors: those sent, or those that are to be filled
    nbytes: int  # bytes that this rank sent
    dtype: str
    gates: int  # how many gates backward had opened on this rank before
    reduce: str = ""  # "SUM", …, where the collective has one
    root: int | None = None  # as a rank of the group
    peer: int | None = None
    ranks: int = 0  # how many ranks its group has

    def __str__(self) -> str:
        if self.op == "barrier":
            return "barrier"
        if self.op == "call":
            return "a call of the implementation under test"
        to = "" if self.peer is None else f" (rank {self.peer})"
        return f"{self.op}{to} of {self.numel} {self.dtype}".rstrip()


@dataclass
class Seen:
    """What passed, per rank, in the order in which it came."""

    launches: list[list[Launch]]
    gates: list[list[str]]
    # Per rank, how many gates were open each time the rank stood waiting for a collective.
    waits: list[list[int]]
    stored: list[int]  # per rank, bytes that it wrote into the key-value store
    trouble: str = ""  # a deadlock or a mismatch, in words


@dataclass
class _Request:
    rank: int
    number: int
    launch: Launch
    members: tuple[int, ...]
    tensors: list[np.ndarray]
    expects: list[int] | None = None  # elements of each tensor to be filled
    keys: list[str] = field(default_factory=list)  # of the store, that are waited for
    call: dict[str, Any] = field(default_factory=dict)  # what an implementation is asked

    @property
    def nbytes(self) -> int:
        return self.launch.nbytes


@dataclass
class _Rank:
    unanswered: dict[int, _Request] = field(default_factory=dict)
    waits_for: int | None = None
    held: int = 0  # bytes of its tensors that wait for other ranks
    ended: str = ""


class _Fields:
    """The fields of one message, read into exact types."""

    def __init__(self, message: dict[str, Any], world_size: int) -> None:
        self._message = message
        self._world_size = world_size

    def word(self, key: str, known: set[str] | dict[str, Any]) -> str:
        # A list is in no set, and asking whether it is raises TypeError.
        word = self._message.get(key, "")
        if type(word) is not str or word not in known:
            raise WireError(f"a {key} that does not exist")
        return word

    def text(self, key: str, longest: int) -> str:
        text = self._message.get(key)
        if type(text) is not str or len(text) > longest:
            raise WireError(f"a message without {key}")
        return text

    def integer(self, key: str, least: int = -(2**63), most: int = 2**63 - 1) -> int:
        value = self._message.get(key)
        if type(value) is not int or not least <= value <= most:
            raise WireError(f"a message without {key}")
        return value

    def rank(self, key: str, ranks: int) -> int | None:
        return None if self._message.get(key) is None else self.integer(key, 0, ranks - 1)

    def integers(self, key: str) -> list[int] | None:
        value = self._message.get(key)
        if value is None:
            return None
        if type(value) is not list or len(value) > _MOST_TENSORS:
            raise WireError(f"a message without {key}")
        if not all(type(n) is int and 0 <= n < 2**31 for n in value):
            raise WireError(f"a message without {key}")
        return value

    def texts(self, key: str, longest: int) -> list[str]:
        value = self._message.get(key)
        if type(value) is not list or len(value) > _MOST_KEYS:
            raise WireError(f"a message without {key}")
        if not all(type(text) is str and len(text) <= longest for text in value):
            raise WireError(f"a message without {key}")
        return value

    def tensors(self) -> list[np.ndarray]:
        tensors = self._message.get("tensors")
        if type(tensors) is not list or len(tensors) > _MOST_TENSORS:
            raise WireError("a collective without tensors")
        if not all(type(tensor) is np.ndarray for tensor in tensors):
            raise WireError("a collective without tensors")
        return tensors

    def members(self) -> tuple[int, ...]:
        members = self.integers("members")
        if members is None:
            return tuple(range(self._world_size))
        if len(set(members)) != len(members) or not all(m < self._world_size for m in members):
            raise WireError("a group that does not exist")
        return tuple(members)


class Router:
    """For ranks 0 … world_size−1. `replies` fills with (rank, message) to be sent."""

    def __init__(
        self,
        world_size: int,
        gates: list[dict[str, Any]] | None = None,
        hold: bool = False,
    ) -> None:
        """`gates`: per rank, what is behind each gate. `hold`: keep answers back, see above."""
        self.replies: deque[tuple[int, dict[str, Any]]] = deque()
        self.seen = Seen(*([[] for _ in range(world_size)] for _ in range(3)), [0] * world_size)
        self._ranks = [_Rank() for _ in range(world_size)]
        self._gates = gates or [{} for _ in range(world_size)]
        self._hold = hold
        self._held: list[tuple[int, dict[str, Any]]] = []
        self._call: Callable[[list[dict[str, Any]]], None] | None = None
        self._calling: list[_Request] = []
        # Collectives of each group, by name and members: a queue for each of its ranks.
        self._groups: dict[tuple[str, tuple[int, ...]], dict[int, deque[_Request]]] = {}
        self._number: dict[tuple[str, tuple[int, ...]], int] = {}
        # Messages, by group, sender, receiver and tag; receivers from anybody have sender None.
        self._sent: dict[tuple, deque[_Request]] = {}
        self._wanted: dict[tuple, deque[_Request]] = {}
        self._store: dict[str, bytes] = {}
        self._waiting_for_keys: list[_Request] = []

    def on_call(self, call: Callable[[list[dict[str, Any]]], None]) -> None:
        """Hand `call` what each rank asks of an implementation under test, once all have asked.

        The answers come back by `answer_call`.
        """
        self._call = call

    def take(self, rank: int, message: dict[str, Any]) -> None:
        """A message of `rank`. Raises WireError if it is not one that a link sends."""
        fields = _Fields(message, len(self._ranks))
        match fields.word("kind", {"collective", "gate", "waits", "store"}):
            case "collective":
                self._launch(rank, fields, message)
            case "gate":
                self._open(rank, fields)
            case "store":
                self._use_store(rank, fields, message)
            case "waits":
                self._wait(rank, fields.integer("for"))
        self._look_for_deadlock()

    def end(self, rank: int, how: str) -> None:
        """`rank` has ended, `how` says in words; nobody waits for it any longer."""
        state = self._ranks[rank]
        state.ended, state.waits_for = how, None
        self._look_for_deadlock()

    def let_go(self) -> bool:
        """Give what is held. False if nothing was."""
        held, self._held = self._held, []
        for rank, reply in held:
            self._answer(rank, reply)
        return bool(held)

    def answer_call(self, rank: int, reply: dict[str, Any]) -> None:
        """What the implementation under test said on `rank`: {"value": …} or {"failed": why}."""
        for request in self._calling:
            if request.rank == rank:
                self._calling.remove(request)
                self._answer(rank, {"number": request.number, **reply})
                return

    def _wait(self, rank: int, number: int) -> None:
        state = self._ranks[rank]
        if number not in state.unanswered:
            return
        state.waits_for = number
        self.seen.waits[rank].append(len(self.seen.gates[rank]))
        if len(self.seen.waits[rank]) > _MOST_LAUNCHES:
            raise WireError(f"more than {_MOST_LAUNCHES} times that it waits")

    def _launch(self, rank: int, fields: _Fields, message: dict[str, Any]) -> None:
        op = fields.word("op", _OPS | _WITHOUT_ALL)
        tensors, members, expects = fields.tensors(), fields.members(), fields.integers("expects")
        name = fields.text("group", _LONGEST_KEY)
        if rank not in members:
            raise WireError("a collective of a group to which it does not belong")
        reduce = fields.word("reduce", _FOLD if op in _REDUCING else {""})
        root = fields.rank("root", len(members))
        if (root is None) == (op in _ROOTED):
            raise WireError("a collective without its root")
        numel = sum(t.size for t in tensors) if tensors else sum(expects or [])
        launch = Launch(
            op,
            numel,
            sum(t.nbytes for t in tensors),
            dtype_name(tensors[0]) if tensors else "",
            len(self.seen.gates[rank]),
            reduce,
            root,
            fields.rank("peer", len(self._ranks)),
            len(members),
        )
        number = fields.integer("number", 0)
        request = _Request(rank, number, launch, members, tensors, expects)
        state = self._ranks[rank]
        if number in state.unanswered:
            raise WireError("a request that was made before")
        if len(self.seen.launches[rank]) >= _MOST_LAUNCHES:
            raise WireError(f"more than {_MOST_LAUNCHES} collectives")
        state.held += request.nbytes
        if state.held > _MOST_HELD:
            raise WireError(f"more than {_MOST_HELD:,} bytes that nobody has received")
        if op == "call":
            request.call = {
                "step": fields.word("step", {"wrap", "finish"}),
                "which": fields.integer("which", 0, 1000),
                "value": message.get("value"),
            }
        else:
            self.seen.launches[rank].append(launch)
        state.unanswered[number] = request
        if op in _WITHOUT_ALL:
            self._post(request, name, fields.integer("tag"))
        else:
            queues = self._groups.setdefault((name, members), {r: deque() for r in members})
            queues[rank].append(request)
            self._match_collectives((name, members))

    def _match_collectives(self, group: tuple[str, tuple[int, ...]]) -> None:
        queues = self._groups[group]
        while all(queues.values()):
            together = [queues[rank].popleft() for rank in group[1]]
            number = self._number[group] = self._number.get(group, 0) + 1
            trouble = _disagreement(together, number, of_all=len(group[1]) == len(self._ranks))
            if trouble:
                self._fail(trouble, together)
                continue
            if together[0].launch.op == "call":
                self._forward(together)
                continue
            try:
                results = _compute(together)
            except (ValueError, TypeError, KeyError, IndexError):
                self._fail(f"{together[0].launch} cannot be done", together)
                continue
            for request, result in zip(together, results, strict=True):
                self._give(request, result)

    def _forward(self, together: list[_Request]) -> None:
        if self._call is None:
            self._fail("there is no implementation to call", together)
            return
        self._calling += together
        self._call([request.call for request in together])

    def _post(self, request: _Request, name: str, tag: int) -> None:
        """Join a sent message with who wants it, in the order in which both came."""
        group = (name, request.members)
        if request.launch.op == "send":
            if request.launch.peer is None or request.launch.peer not in request.members:
                raise WireError("a message to nobody")
            route = (group, request.rank, request.launch.peer, tag)
            anybody = (group, None, request.launch.peer, tag)
            queues = [self._wanted[key] for key in (route, anybody) if self._wanted.get(key)]
            if queues:
                # Of two receivers the one that asked first.
                wanted = min(queues, key=lambda queue: queue[0].number).popleft()
                self._deliver(request, wanted)
            else:
                self._sent.setdefault(route, deque()).append(request)
            return
        sources = [request.launch.peer]
        if request.launch.peer is None:
            sources = [rank for rank in request.members if rank != request.rank]
        for source in sources:
            queue = self._sent.get((group, source, request.rank, tag))
            if queue:
                self._deliver(queue.popleft(), request)
                return
        key = (group, request.launch.peer, request.rank, tag)
        self._wanted.setdefault(key, deque()).append(request)

    def _deliver(self, sent: _Request, wanted: _Request) -> None:
        self._give(sent, [])
        self._give(wanted, sent.tensors, source=sent.rank)

    def _give(self, request: _Request, tensors: list[np.ndarray], **more: Any) -> None:
        reply = {"number": request.number, "tensors": tensors, **more}
        if self._hold:
            self._held.append((request.rank, reply))
        else:
            self._answer(request.rank, reply)

    def _answer(self, rank: int, reply: dict[str, Any]) -> None:
        state = self._ranks[rank]
        request = state.unanswered.pop(reply["number"], None)
        if request is not None:
            state.held -= request.nbytes
        if state.waits_for == reply["number"]:
            state.waits_for = None
        self.replies.append((rank, reply))

    def _fail(self, trouble: str, requests: list[_Request]) -> None:
        self.seen.trouble = self.seen.trouble or trouble
        for request in requests:
            self._answer(request.rank, {"number": request.number, "failed": trouble})

    def _open(self, rank: int, fields: _Fields) -> None:
        name = fields.word("name", self._gates[rank])
        if len(self.seen.gates[rank]) >= _MOST_LAUNCHES:
            raise WireError("gates without end")
        self.seen.gates[rank].append(name)
        number = fields.integer("number", 0)
        self.replies.append((rank, {"number": number, "factor": self._gates[rank][name]}))
        if self._hold and all(
            set(opened) == set(gates)
            for opened, gates in zip(self.seen.gates, self._gates, strict=True)
        ):
            self._hold = False
            self.let_go()

    def _use_store(self, rank: int, fields: _Fields, message: dict[str, Any]) -> None:
        op = fields.word("op", {"set", "get", "add", "wait", "check", "delete", "count"})
        keys, number = fields.texts("keys", _LONGEST_KEY), fields.integer("number", 0)
        reply: dict[str, Any] = {"number": number}
        if op not in ("wait", "check", "count") and len(keys) != 1:
            raise WireError("a key of the store is missing")
        if op in ("set", "add"):
            value = message.get("value")
            if type(value) is not np.ndarray or value.dtype != np.uint8:
                raise WireError("a value of the store is missing")
            data = value.tobytes()
            if op == "add":
                reply["amount"] = _as_number(self._store.get(keys[0], b"0"))
                reply["amount"] += fields.integer("amount", -(2**31), 2**31)
                data = str(reply["amount"]).encode()
            self._store[keys[0]] = data
            self.seen.stored[rank] += len(data)
            if max(self.seen.stored[rank], len(self._store) * 64) > _MOST_STORED:
                raise WireError(f"more than {_MOST_STORED:,} bytes for the store")
        elif op == "check":
            reply["amount"] = all(key in self._store for key in keys)
        elif op == "count":
            reply["amount"] = len(self._store)
        elif op == "delete":
            reply["amount"] = self._store.pop(keys[0], None) is not None
        else:
            launch = Launch(f"the store ({op})", 0, 0, "", len(self.seen.gates[rank]))
            request = _Request(rank, number, launch, (), [], keys=keys)
            if number in self._ranks[rank].unanswered:
                raise WireError("a request that was made before")
            self._ranks[rank].unanswered[number] = request
            self._waiting_for_keys.append(request)
            self._look_for_keys()
            return
        self.replies.append((rank, reply))
        self._look_for_keys()

    def _look_for_keys(self) -> None:
        waiting, self._waiting_for_keys = self._waiting_for_keys, []
        for request in waiting:
            if not all(key in self._store for key in request.keys):
                self._waiting_for_keys.append(request)
                continue
            reply: dict[str, Any] = {"number": request.number}
            if request.launch.op == "the store (get)":
                reply["value"] = np.frombuffer(self._store[request.keys[0]], np.uint8)
            self._answer(request.rank, reply)

    def _look_for_deadlock(self) -> None:
        running = [state for state in self._ranks if not state.ended]
        if not running or any(state.waits_for is None for state in running) or self._calling:
            return
        if self.let_go():
            return
        words = []
        for rank, state in enumerate(self._ranks):
            if state.ended:
                words.append(f"rank {rank} has {state.ended}")
            else:
                waits_in = state.unanswered[state.waits_for].launch
                words.append(f"rank {rank} waits in {waits_in}")
        trouble = "; ".join(words)
        for queues in self._groups.values():
            for queue in queues.values():
                queue.clear()
        self._sent.clear()
        self._wanted.clear()
        self._waiting_for_keys.clear()
        for state in running:
            self._fail(trouble, list(state.unanswered.values()))


def _as_number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise WireError("a value of the store that is no number") from None


def _disagreement(together: list[_Request], number: int, *, of_all: bool) -> str:
    """In words, the first two ranks that do not do the same; empty if all do."""
    first = together[0]
    kind = "collective" if of_all else f"the group's ({len(together)} ranks) collective"
    for other in together[1:]:
        if not _agree(first, other):
            return (
                f"{kind} number {number} is {first.launch} on rank {first.rank} "
                f"and {other.launch} on rank {other.rank}"
            )
    launch = first.launch
    if launch.op in ("broadcast", "scatter"):
        root = together[launch.root]
        sizes = [tensor.size for tensor in root.tensors]
        for index, other in enumerate(together):
            own = sizes[index : index + 1] if launch.op == "scatter" else sizes
            if other.expects != own:
                return (
                    f"{kind} number {number} is a {launch.op} of {sum(own)} elements from rank "
                    f"{root.rank}, and rank {other.rank} has room for {sum(other.expects or [])}"
                )
    if launch.op == "all_to_all":
        for index, receiver in enumerate(together):
            if [sender.tensors[index].size for sender in together] != receiver.expects:
                return (
                    f"{kind} number {number}: what the ranks send rank {receiver.rank} in "
                    "all_to_all has other sizes than its room for it"
                )
    return ""


def _agree(first: _Request, other: _Request) -> bool:
    ours, theirs = first.launch, other.launch
    if (ours.op, ours.reduce, ours.root) != (theirs.op, theirs.reduce, theirs.root):
        return False
    if ours.op == "call":
        return [first.call[key] for key in ("step", "which")] == [
            other.call[key] for key in ("step", "which")
        ]
    if ours.op in ("broadcast", "scatter"):
        return True
    if ours.op == "all_to_all":
        kinds = [{tensor.dtype for tensor in one.tensors} for one in (first, other)]
        return kinds[0] == kinds[1] and len(first.tensors) == len(other.tensors)
    return [(t.shape, t.dtype) for t in first.tensors] == [
        (t.shape, t.dtype) for t in other.tensors
    ]


def _compute(together: list[_Request]) -> list[list[np.ndarray]]:
    """What each rank of the group receives."""
    launch, tensors = together[0].launch, [request.tensors for request in together]
    ranks = range(len(together))
    match launch.op:
        case "all_reduce":
            total = [_fold(launch.reduce, list(each)) for each in zip(*tensors, strict=True)]
            return [total for _ in ranks]
        case "reduce":
            total = [_fold(launch.reduce, list(each)) for each in zip(*tensors, strict=True)]
            return [total if rank == launch.root else [] for rank in ranks]
        case "reduce_scatter":
            # Rank by rank, the parts of one rank together.
            each = len(tensors[0]) // len(together)
            if each * len(together) != len(tensors[0]):
                raise ValueError("parts that cannot be shared out")
            return [
                [_fold(launch.reduce, [own[r * each + k] for own in tensors]) for k in range(each)]
                for r in ranks
            ]
        case "broadcast":
            return [tensors[launch.root] for _ in ranks]
        case "all_gather":
            everything = [tensor for own in tensors for tensor in own]
            return [everything for _ in ranks]
        case "gather":
            everything = [tensor for own in tensors for tensor in own]
            return [everything if rank == launch.root else [] for rank in ranks]
        case "scatter":
            return [[tensors[launch.root][rank]] for rank in ranks]
        case "all_to_all":
            return [[own[rank] for own in tensors] for rank in ranks]
        case "barrier":
            return [[] for _ in ranks]
    raise ValueError(launch.op)


def _fold(reduce: str, values: list[np.ndarray]) -> np.ndarray:
    fold, dtype = _FOLD[reduce], values[0].dtype
    wide = [_widened(value) for value in values]
    total = wide[0].copy()
    # Overflow and inf − inf are ordinary results; numpy would print a warning.
    with np.errstate(all="ignore"):
        for value in wide[1:]:
            total = fold(total, value)
        if reduce == "AVG":
            total = total / len(values)
        return _narrowed(np.asarray(total), dtype)


def _widened(value: np.ndarray) -> np.ndarray:
    """In a type that numpy adds in: the two with 16 bits become float32."""
    if value.dtype == BFLOAT16:
        return (value.view("<u2").astype("<u4") << 16).view("<f4")
    return value.astype("float32") if value.dtype == np.float16 else value


def _narrowed(total: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype != BFLOAT16:
        return total.astype(dtype)
    bits = np.ascontiguousarray(total, "<f4").view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    # Rounding could carry a NaN over into infinity.
    rounded = np.where(np.isnan(total), np.uint16(0x7FC0), rounded).astype("<u2")
    return rounded.reshape(total.shape).view(BFLOAT16)
