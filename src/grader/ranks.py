"""Run a group of ranks in the sandbox and collect their data: the trusted side's end of a group.

One event loop reads what the ranks send, hands collectives and gates to the router, and writes its
answers. It never blocks on a rank: a rank that does not read, sends nonsense, or never ends costs
its own group the time limit, and nobody else anything.
"""

import builtins
import json
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from grader.inside.wire import DEEPEST, Decoder, WireError, encode
from grader.router import Router, Seen

_LARGEST = 16 * 2**20  # bytes of one message of a rank
_MOST_VALUES = 100_000  # of one message of a rank
_DEEPEST = DEEPEST - 1  # levels of one message of a rank: its value goes on to a judge, one deeper
_MOST_SENT = 128 * 2**20  # bytes that one rank may send in all
_MOST_UNREAD = 32 * 2**20  # bytes that wait to be written, above which reading pauses
_AFTER_FAILURE = 1.0  # seconds that the other ranks get when one has failed
_WALL = 10  # a check may take this many times the processor time that each rank may use
_IDLE = 5.0  # seconds in which no rank does anything, after which they are ended
_AFTER_EOF = 2.0  # seconds in which the end of a process is reported after its connection closed


@dataclass
class RankEnd:
    """How one rank ended.

    `how` is "returned", "raised", "ended early", "timed out", "used too much", "sent nonsense", or
    "stopped" because another rank had failed. `order` counts the ranks as they ended; `culprit`
    says that the rank failed by itself, before the ranks were seen to miss each other.
    """

    how: str = ""
    value: Any = None  # what the check's on_rank returned there
    error: dict[str, Any] = field(default_factory=dict)  # type, message, cell, line
    failed_cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    text: str = ""  # for people, after "rank 1 "
    order: int = 0
    culprit: bool = False


@dataclass
class GroupEnd:
    """How all ranks ended, and what passed between them."""

    ranks: list[RankEnd]
    seen: Seen
    isolation: str  # what stood between the ranks, a key of `grader.sandbox.INSIDE`


def run_group(
    address: str,
    jobs: list[dict[str, Any]],
    *,
    link: str = "routed",
    seconds: int = 3,
    router: Router | None = None,
    implementations: list[dict[str, Any]] | None = None,
    patience: float = 1.0,
) -> GroupEnd:
    """Run one rank for each of `jobs` at the fork server `address`; back when all have ended.

    Each rank may use `seconds` of processor time, and all together ten times that by the clock: on
    a loaded machine the clock runs faster than a solution. A group that does nothing for 5 s is
    ended, too. `patience` shortens both. `implementations` are the jobs of as many processes that
    run what a student's test is about; they are connected with each other by a router of their
    own. All processes of the group are gone, or being killed by the kernel, when this returns.
    Raises OSError if the fork server is gone, which is the grader's failure and not the student's.
    """
    router = router or Router(len(jobs))
    return _Group(address, jobs, link, seconds, router, implementations or [], patience).run()


class _Peer:
    """One rank, seen from here."""

    def __init__(self, rank: int, connection: socket.socket, job: dict[str, Any]) -> None:
        self.rank = rank
        self.stands_in = False  # whether it is an implementation's process and not a student's
        self.cells = {cell["id"]: cell["source"].count("\n") + 1 for cell in job.get("cells", [])}
        self.connection = connection
        self.decoder = Decoder(_LARGEST, _DEEPEST, _MOST_VALUES)
        self.outgoing = bytearray()
        self.received = 0
        self.events = selectors.EVENT_READ  # that are waited for
        self.end = RankEnd()
        self.eof_at: float | None = None

    @property
    def running(self) -> bool:
        return not self.end.how


class _Group:
    def __init__(self, address, jobs, link, seconds, router, implementations, patience) -> None:
        self._jobs = [*jobs, *implementations]
        self._router = router
        self._behind = Router(len(implementations))  # of the implementations
        self._router.on_call(self._call)
        self._isolation = ""
        self._idle = _IDLE * patience
        self._wall = seconds * _WALL * patience
        self._deadline = time.monotonic() + self._wall
        self._control = socket.socket(socket.AF_UNIX)
        self._control.connect(address)
        pairs = [socket.socketpair() for _ in self._jobs]
        everybody = [
            _Peer(number % len(jobs), ours, job)
            for number, ((ours, _), job) in enumerate(zip(pairs, self._jobs, strict=True))
        ]
        self._peers, self._stands = everybody[: len(jobs)], everybody[len(jobs) :]
        for stand in self._stands:
            stand.stands_in = True
        request = {"link": link, "seconds": seconds}
        theirs = [other for _, other in pairs]
        socket.send_fds(
            self._control, [json.dumps(request).encode()], [other.fileno() for other in theirs]
        )
        for other in theirs:
            other.close()
        self._selector = selectors.DefaultSelector()
        self._control_text = b""

    def run(self) -> GroupEnd:
        try:
            self._loop()
        finally:
            self._selector.close()
            self._control.close()
            for peer in [*self._peers, *self._stands]:
                peer.connection.close()
        ends = [peer.end for peer in self._peers]
        return GroupEnd(ends, self._router.seen, self._isolation or "none")

    def _loop(self) -> None:
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ, None)
        everybody = [*self._peers, *self._stands]
        for peer, job in zip(everybody, self._jobs, strict=True):
            peer.connection.setblocking(False)
            peer.outgoing += encode(job)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        while any(peer.running for peer in self._peers) or not self._isolation:
            now = time.monotonic()
            if now >= self._deadline:
                self._time_out(f"was still running after {self._wall:g} s")
                return
            self._write()
            for key, events in self._selector.select(min(0.1, self._deadline - now)):
                if key.data is None:
                    self._hear_warden()
                elif events & selectors.EVENT_READ:
                    self._hear(key.data)
            self._bury(time.monotonic())

    def _call(self, asked: list[dict[str, Any]]) -> None:
        """Hand a call of the implementation under test to the processes that run it."""
        for stand, call in zip(self._stands, asked, strict=True):
            if stand.running:
                stand.outgoing += encode(call)
            else:
                self._router.answer_call(stand.rank, {"failed": stand.end.text})

    def _write(self) -> None:
        for router, peers in ((self._router, self._peers), (self._behind, self._stands)):
            while router.replies:
                rank, message = router.replies.popleft()
                if peers[rank].running:
                    peers[rank].outgoing += encode(message)
        everybody = [*self._peers, *self._stands]
        for peer in everybody:
            if peer.eof_at is None and peer.outgoing:
                try:
                    sent = peer.connection.send(memoryview(peer.outgoing)[: 1 << 20])
                except BlockingIOError:
                    continue
                except OSError:
                    peer.outgoing.clear()
                    continue
                del peer.outgoing[:sent]
        # Too much unread: peers with pending output are not read.
        listening = sum(len(peer.outgoing) for peer in everybody) < _MOST_UNREAD
        for peer in everybody:
            if peer.eof_at is None:
                events = selectors.EVENT_READ if listening or not peer.outgoing else 0
                events |= selectors.EVENT_WRITE if peer.outgoing else 0
                if events != peer.events:
                    peer.events = events
                    self._selector.modify(peer.connection, events, peer)

    def _hear_warden(self) -> None:
        data = self._control.recv(1 << 16)
        if not data:
            if any(peer.running for peer in self._peers):
                raise OSError("the fork server closed its connection")
            self._isolation = self._isolation or "none"
        *lines, self._control_text = (self._control_text + data).split(b"\n")
        everybody = [*self._peers, *self._stands]
        for line in lines:
            message = json.loads(line)
            if "isolation" in message:
                self._isolation = message["isolation"]
            elif "idle" in message:
                if message["idle"] >= self._idle:
                    self._time_out(f"had done nothing for {self._idle:g} s: does it sleep?")
            elif "too much" in message:
                for peer in self._peers:
                    self._drain(peer)
                    if peer.running:
                        self._finish(peer, "used too much", f"used too much {message['too much']}")
            elif (peer := everybody[message["rank"]]).running:
                self._drain(peer)
                if peer.running:
                    self._finish(peer, "ended early", _in_words(message["status"]))

    def _drain(self, peer: _Peer) -> None:
        """Take what a rank sent before it ended."""
        while peer.running and peer.eof_at is None:
            before = peer.received
            self._hear(peer)
            if peer.received == before:
                return

    def _hear(self, peer: _Peer) -> None:
        if peer.eof_at is not None:
            return  # `_drain` has come to the end of it, within the same batch of events
        try:
            data = peer.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            peer.eof_at = time.monotonic()
            self._selector.unregister(peer.connection)
            return
        peer.received += len(data)
        if not peer.running:
            return
        try:
            if peer.received > _MOST_SENT:
                raise WireError(f"more than {_MOST_SENT:,} bytes")
            for message in peer.decoder.feed(data):
                self._take(peer, message)
        except WireError as error:
            self._finish(peer, "sent nonsense", f"sent {error}")

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        if not peer.running:
            return
        kind = message.get("kind")
        if type(kind) is not str:
            raise WireError("a message of no kind")
        if peer.stands_in and kind == "call answered":
            reply = {key: message[key] for key in ("value", "failed") if key in message}
            self._router.answer_call(peer.rank, reply)
        elif kind == "returned":
            peer.end.value = message.get("value")
            self._finish(peer, "returned", "returned")
        elif kind == "raised":
            peer.end.error = _error(message, peer.cells)
            self._finish(peer, "raised", f"raised {peer.end.error['type']}")
        elif kind == "cell failed":
            error = _error(message, peer.cells)
            if error["cell"]:
                peer.end.failed_cells[error["cell"]] = error
        else:
            (self._behind if peer.stands_in else self._router).take(peer.rank, message)

    def _finish(self, peer: _Peer, how: str, text: str) -> None:
        peer.end.how, peer.end.text = how, text
        if peer.stands_in:
            # A student's test can bring an implementation down; that is for its author to see.
            self._router.answer_call(peer.rank, {"failed": f"the implementation {text}"})
            return
        peer.end.order = sum(not other.running for other in self._peers)
        peer.end.culprit = how != "returned" and not self._router.seen.trouble
        if how != "returned":
            # The check is lost. The others get a moment, in which a deadlock would show.
            self._deadline = min(self._deadline, time.monotonic() + _AFTER_FAILURE)
        self._router.end(peer.rank, text)

    def _bury(self, now: float) -> None:
        for peer in [*self._peers, *self._stands]:
            if peer.running and peer.eof_at is not None and now - peer.eof_at > _AFTER_EOF:
                self._finish(peer, "ended early", "closed its connection")

    def _time_out(self, text: str) -> None:
        failed = any(peer.end.how not in ("", "returned") for peer in self._peers)
        for peer in self._peers:
            if peer.running:
                peer.end.how = "stopped" if failed else "timed out"
                peer.end.text = text


def _error(message: dict[str, Any], cells: dict[str, int]) -> dict[str, Any]:
    """What a rank says of an exception, reduced to what it may say.

    The text may carry the rank's input, and is shown for visible checks only; type, cell and line
    are always shown, so each has to be one that exists.
    """
    kind, cell, line = (message.get(key) for key in ("type", "cell", "line"))
    text = message.get("message")
    known = isinstance(kind, str) and isinstance(getattr(builtins, kind, None), type)
    if not isinstance(cell, str) or cell not in cells:
        cell, line = "", None
    return {
        "type": kind if known else "an exception of its own",
        "message": text[:2000] if type(text) is str else "",
        "cell": cell,
        "line": line if type(line) is int and 0 < line <= cells.get(cell, 0) else None,
    }


def _in_words(status: int) -> str:
    """How a process ended: its exit code, by a shell's convention for signals."""
    if status < 0 or status > 128:
        number = -status if status < 0 else status - 128
        try:
            name = signal.Signals(number).name
        except ValueError:
            return f"was ended by signal {number}"
        if name == "SIGXCPU":
            return "used up its processor time: does a loop never end?"
        return f"was ended by {name}"
    return f"ended without a result, with exit code {status}"
