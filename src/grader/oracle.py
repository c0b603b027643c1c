"""The instructor's half of checks, asked: one process in the sandbox that answers many calls.

What runs there is `grader.inside.oracle`: an author's code, never a student's. The process is
started when it is first needed, and again after it has failed.
"""

import json
import socket
import time
from typing import Any, Self

from grader.inside.wire import Decoder, WireError, encode

_PROCESSOR_TIME = 3600  # seconds in the oracle's life; each call has a limit by the clock
_PER_CALL = 60.0  # seconds by the clock


class OracleError(RuntimeError):
    """The author's code failed, or the process that runs it."""


class Oracle:
    """Answers calls about checks at the fork server `address`. Close it, or use it in a `with`."""

    def __init__(self, address: str, seconds: float = _PER_CALL) -> None:
        self._address = address
        self._seconds = seconds
        self._control: socket.socket | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        for connection in (self._connection, self._control):
            if connection is not None:
                connection.close()
        self._connection = self._control = None

    def ask(self, call: dict[str, Any]) -> Any:
        """What the check's own code says to `call`.

        Raises OracleError if it fails or takes longer than its limit, OSError if there is no fork
        server.
        """
        if self._connection is None:
            self._start()
        try:
            self._connection.settimeout(self._seconds)
            self._connection.sendall(encode(call))
            answer = self._receive(time.monotonic() + self._seconds)
        except (TimeoutError, WireError, OSError) as error:
            self.close()
            raise OracleError(f"{type(error).__name__}: {error}") from None
        if answer.get("kind") != "returned":
            raise OracleError(f"raised {answer.get('type')}: {answer.get('message')}")
        return answer["value"]

    def _start(self) -> None:
        control = socket.socket(socket.AF_UNIX)
        control.connect(self._address)
        ours, theirs = socket.socketpair()
        request = json.dumps({"link": "routed", "seconds": _PROCESSOR_TIME}).encode()
        socket.send_fds(control, [request], [theirs.fileno()])
        theirs.close()
        self._control, self._connection = control, ours
        ours.sendall(encode({"call": "oracle"}))

    def _receive(self, deadline: float) -> dict[str, Any]:
        decoder = Decoder()
        while True:
            # What the warden reports is of no interest, and must not fill its pipe.
            self._control.setblocking(False)
            try:
                while self._control.recv(1 << 16):
                    pass
            except BlockingIOError:
                pass
            self._connection.settimeout(max(0.01, min(1.0, deadline - time.monotonic())))
            try:
                data = self._connection.recv(1 << 20)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no answer in {self._seconds:g} s") from None
                continue
            if not data:
                raise ConnectionError("its process has ended")
            for message in decoder.feed(data):
                return message
