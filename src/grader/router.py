"""The post office of a group of ranks: carries messages, adds up, writes down what it saw.

Every collective of a solution passes through here, because ranks have no other way to each other.
What stands in `Seen` is therefore not a report by the solution: it is what happened.

A collective is answered when all ranks have launched theirs. Answers can be *held* until backward
has passed its last gate on every rank: a reducer that overlaps does not notice, one that waits in
the middle of backward stands still there, and says so by standing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grader.inside.wire import WireError

_OPS = {"all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter"}
_OPS |= {"barrier"}
_WITHOUT_ALL = {"send", "recv"}
_MOST_LAUNCHES = 20_000
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
    numel: int  # elements of all its tensors
    nbytes: int
    dtype: str
    gates: int  # how many gates backward had opened on this rank before
    reduce: str = ""  # "SUM", …, where the collective has one
    root: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        if self.op == "barrier":
            return "barrier"
        to = "" if self.peer is None else f" (rank {self.peer})"
        return f"{self.op}{to} of {self.numel} {self.dtype}"


@dataclass
class Seen:
    """What passed, per rank, in the order in which it came."""

    launches: list[list[Launch]]
    gates: list[list[str]]
    # Per rank, how many gates were open each time the rank stood waiting for a collective.
    waits: list[list[int]]
    trouble: str = ""  # a deadlock or a mismatch, in words

    def collectives(self, rank: int, least: int = 0) -> list[Launch]:
        """The launches of `rank` with more than `least` elements."""
        return [launch for launch in self.launches[rank] if launch.numel > least]


@dataclass
class _Request:
    rank: int
    number: int
    launch: Launch
    tensors: list[np.ndarray]
    tag: int = 0


@dataclass
class _Rank:
    queue: deque[_Request] = field(default_factory=deque)  # collectives not yet matched
    point_to_point: list[_Request] = field(default_factory=list)
    launched: int = 0
    unanswered: dict[int, Launch] = field(default_factory=dict)
    waits_for: int | None = None
    ended: str = ""


class Router:
    """For ranks 0 … world_size−1. `replies` fills with (rank, message) to be sent."""

    def __init__(
        self, world_size: int, gates: list[dict[str, float]] | None = None, hold: bool = False
    ) -> None:
        """`gates`: per rank, the number behind each gate. `hold`: keep answers back, see above."""
        self.replies: deque[tuple[int, dict[str, Any]]] = deque()
        self.seen = Seen(*([[] for _ in range(world_size)] for _ in range(3)))
        self._ranks = [_Rank() for _ in range(world_size)]
        self._gates = gates or [{} for _ in range(world_size)]
        self._hold = hold
        self._held: list[tuple[int, dict[str, Any]]] = []

    def take(self, rank: int, message: dict[str, Any]) -> None:
        """A message of `rank`. Raises WireError if it is not one that a link sends."""
        kind = message.get("kind")
        if kind == "collective":
            self._launch(rank, message)
        elif kind == "gate":
            self._open(rank, message)
        elif kind == "waits":
            state = self._ranks[rank]
            number = _integer(message, "for")
            if number in state.unanswered:
                state.waits_for = number
                self.seen.waits[rank].append(len(self.seen.gates[rank]))
                if len(self.seen.waits[rank]) > _MOST_LAUNCHES:
                    raise WireError(f"more than {_MOST_LAUNCHES} waits")
        else:
            raise WireError("a message of an unknown kind")
        self._look_for_deadlock()

    def end(self, rank: int, how: str) -> None:
        """`rank` has ended; `how` completes the sentence "rank 0 has …"."""
        self._ranks[rank].ended = how
        self._look_for_deadlock()

    def let_go(self) -> bool:
        """Send what is held back. True if there was something."""
        self._hold = False
        held, self._held = self._held, []
        for rank, reply in held:
            self._answer(rank, reply)
        return bool(held)

    def _launch(self, rank: int, message: dict[str, Any]) -> None:
        tensors = message.get("tensors")
        if not isinstance(tensors, list) or not all(isinstance(t, np.ndarray) for t in tensors):
            raise WireError("a collective without tensors")
        root, peer = message.get("root"), message.get("peer")
        for other in (root, peer):
            if other is not None and (type(other) is not int or not 0 <= other < len(self._ranks)):
                raise WireError("a rank that does not exist")
        op = _one_of(_OPS | _WITHOUT_ALL, message.get("op"))
        reduce = _one_of({"", *_FOLD}, message.get("reduce", ""))
        launch = Launch(
            op,
            sum(t.size for t in tensors),
            sum(t.nbytes for t in tensors),
            tensors[0].dtype.name if tensors else "",
            len(self.seen.gates[rank]),
            reduce,
            root,
            peer,
        )
        request = _Request(rank, _integer(message, "number"), launch, tensors)
        if len(self.seen.launches[rank]) >= _MOST_LAUNCHES:
            raise WireError(f"more than {_MOST_LAUNCHES} collectives")
        self.seen.launches[rank].append(launch)
        state = self._ranks[rank]
        state.unanswered[request.number] = launch
        if op in _WITHOUT_ALL:
            if peer is None:
                raise WireError("a message to nobody")
            request.tag = _integer(message, "tag")
            state.point_to_point.append(request)
            self._match_messages()
        else:
            state.queue.append(request)
            self._match_collectives()

    def _match_collectives(self) -> None:
        while all(state.queue for state in self._ranks):
            together = [state.queue.popleft() for state in self._ranks]
            for state in self._ranks:
                state.launched += 1
            trouble = self._disagreement(together)
            if trouble:
                self._fail(trouble, together)
                continue
            try:
                results = _compute(together)
            except (ValueError, TypeError, KeyError, IndexError):
                self._fail(f"{together[0].launch} cannot be done", together)
                continue
            for request, result in zip(together, results, strict=True):
                self._give(request, result)

    def _disagreement(self, together: list[_Request]) -> str:
        """In words, the first two ranks that do not do the same; empty if all do."""
        first = together[0]
        for other in together[1:]:
            same = (
                other.launch.op == first.launch.op
                and other.launch.reduce == first.launch.reduce
                and other.launch.root == first.launch.root
            )
            if first.launch.op not in ("scatter",):
                same &= [(t.shape, t.dtype) for t in other.tensors] == [
                    (t.shape, t.dtype) for t in first.tensors
                ]
            if not same:
                return (
                    f"collective number {self._ranks[0].launched} is {first.launch} on rank 0 "
                    f"and {other.launch} on rank {other.rank}"
                )
        return ""

    def _match_messages(self) -> None:
        for source, state in enumerate(self._ranks):
            for sent in [r for r in state.point_to_point if r.launch.op == "send"]:
                target = self._ranks[sent.launch.peer]
                for wanted in target.point_to_point:
                    if (wanted.launch.op, wanted.launch.peer, wanted.tag) == (
                        "recv",
                        source,
                        sent.tag,
                    ):
                        state.point_to_point.remove(sent)
                        target.point_to_point.remove(wanted)
                        self._give(sent, [])
                        self._give(wanted, sent.tensors)
                        break

    def _give(self, request: _Request, tensors: list[np.ndarray]) -> None:
        reply = {"number": request.number, "tensors": tensors}
        if self._hold:
            self._held.append((request.rank, reply))
        else:
            self._answer(request.rank, reply)

    def _answer(self, rank: int, reply: dict[str, Any]) -> None:
        state = self._ranks[rank]
        state.unanswered.pop(reply["number"], None)
        if state.waits_for == reply["number"]:
            state.waits_for = None
        self.replies.append((rank, reply))

    def _fail(self, trouble: str, requests: list[_Request]) -> None:
        self.seen.trouble = self.seen.trouble or trouble
        for request in requests:
            self._answer(request.rank, {"number": request.number, "failed": trouble})

    def _open(self, rank: int, message: dict[str, Any]) -> None:
        name = message.get("name")
        if not isinstance(name, str) or name not in self._gates[rank]:
            raise WireError("a gate that does not exist")
        if len(self.seen.gates[rank]) >= _MOST_LAUNCHES:
            raise WireError("gates without end")
        self.seen.gates[rank].append(name)
        factor = self._gates[rank][name]
        self.replies.append((rank, {"number": _integer(message, "number"), "factor": factor}))
        if self._hold and all(
            set(opened) == set(gates)
            for opened, gates in zip(self.seen.gates, self._gates, strict=True)
        ):
            self.let_go()

    def _look_for_deadlock(self) -> None:
        running = [state for state in self._ranks if not state.ended]
        if not running or any(state.waits_for is None for state in running):
            return
        if self.let_go():
            return
        words = []
        for rank, state in enumerate(self._ranks):
            if state.ended:
                words.append(f"rank {rank} has {state.ended}")
            else:
                words.append(f"rank {rank} waits in {state.unanswered[state.waits_for]}")
        trouble = "; ".join(words)
        for rank, state in enumerate(self._ranks):
            if not state.ended:
                requests = [*state.queue, *state.point_to_point]
                state.queue.clear()
                state.point_to_point.clear()
                self._fail(trouble, [r for r in requests if r.rank == rank])


def _compute(together: list[_Request]) -> list[list[np.ndarray]]:
    """What each rank receives."""
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
            return [[_fold(launch.reduce, [own[rank] for own in tensors])] for rank in ranks]
        case "broadcast":
            return [tensors[launch.root] for _ in ranks]
        case "all_gather":
            return [[own[0] for own in tensors] for _ in ranks]
        case "gather":
            return [[own[0] for own in tensors] if r == launch.root else [] for r in ranks]
        case "scatter":
            return [[tensors[launch.root][rank]] for rank in ranks]
        case "barrier":
            return [[] for _ in ranks]
    raise ValueError(launch.op)


def _fold(reduce: str, values: list[np.ndarray]) -> np.ndarray:
    fold, dtype = _FOLD[reduce], values[0].dtype
    total = values[0].astype("float32") if dtype == "float16" else values[0].copy()
    for value in values[1:]:
        total = fold(total, value)
    if reduce == "AVG":
        total = total / len(values)
    # An array without dimensions becomes a number on the way.
    return np.asarray(total).astype(dtype)


def _one_of(known: set[str], word: Any) -> str:
    # A list is in no set, and asking whether it is raises TypeError.
    if not isinstance(word, str) or word not in known:
        raise WireError("a collective that does not exist")
    return word


def _integer(message: dict[str, Any], key: str) -> int:
    value = message.get(key)
    if type(value) is not int:
        raise WireError(f"a message without {key}")
    return value
