"""Messages between the trusted side and a rank: plain data, and nothing that runs when it is read.

A message is a dictionary of JSON values in which an array may stand anywhere. On the wire:

    4 bytes   length of the JSON text, little-endian
    4 bytes   length of the arrays' bytes
    the JSON text, in which an array is {"$array": [dtype, shape, offset]}
    the arrays' bytes, one after the other

There is no pickle and no format that names a class. The reader believes nothing: lengths, types,
shapes and offsets are checked, and what is wrong raises WireError.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from typing import Any

import numpy as np

HEAD = struct.Struct("<II")
LARGEST = 256 * 2**20  # bytes of one message
DTYPES = frozenset(
    ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]
)
_MARK = "$array"
DEEPEST = 16  # levels of lists and dictionaries in one message


class WireError(ValueError):
    """What arrived is not a message."""


def encode(message: dict[str, Any]) -> bytes:
    """The bytes of `message`. Raises TypeError, naming the type, for what is not plain data."""
    blobs: list[bytes] = []
    text = json.dumps(_flatten(message, blobs, 0)).encode()
    body = b"".join(blobs)
    if len(text) + len(body) > LARGEST:
        raise TypeError(f"{len(text) + len(body):,} bytes; a message has at most {LARGEST:,}")
    return HEAD.pack(len(text), len(body)) + text + body


def _flatten(value: Any, blobs: list[bytes], depth: int) -> Any:
    if depth > DEEPEST:
        raise TypeError(f"data nested more than {DEEPEST} deep")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is np.ndarray:
        if value.dtype.name not in DTYPES:
            raise TypeError(f"an array of {value.dtype.name}")
        offset = sum(map(len, blobs))
        blobs.append(np.ascontiguousarray(value).tobytes())
        return {_MARK: [value.dtype.name, list(value.shape), offset]}
    if type(value) in (list, tuple):
        return [_flatten(item, blobs, depth + 1) for item in value]
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key == _MARK:
                raise TypeError(f"a dictionary with the key {key!r}")
        return {key: _flatten(item, blobs, depth + 1) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__}")


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self, largest: int = LARGEST, deepest: int = DEEPEST) -> None:
        self._largest = largest
        self._deepest = deepest
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Every message that `data` completes. Raises WireError."""
        self._pending += data
        messages = []
        while len(self._pending) >= HEAD.size:
            text, body = HEAD.unpack_from(self._pending)
            end = HEAD.size + text + body
            if text + body > self._largest:
                raise WireError(f"a message of {text + body:,} bytes")
            if len(self._pending) < end:
                break
            whole = bytes(self._pending[HEAD.size : end])
            del self._pending[:end]
            messages.append(_decode(whole[:text], whole[text:], self._deepest))
        return messages


def _decode(text: bytes, body: bytes, deepest: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("a message that is not JSON") from None
    if not isinstance(value, dict):
        raise WireError("a message that is not a dictionary")
    return _restore(value, body, deepest)


def _restore(value: Any, body: bytes, levels: int) -> Any:
    if levels < 0:
        raise WireError("data nested too deep")
    if isinstance(value, list):
        return [_restore(item, body, levels - 1) for item in value]
    if isinstance(value, str):
        _look_at_text(value)
        return value
    if not isinstance(value, dict):
        return value
    if _MARK in value:
        return _restore_array(value[_MARK], body)
    for key in value:
        _look_at_text(key)
    return {key: _restore(item, body, levels - 1) for key, item in value.items()}


def _look_at_text(text: str) -> None:
    """Half of a surrogate pair is valid JSON and can be written to no file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WireError("text that is not Unicode") from None


def _restore_array(description: Any, body: bytes) -> np.ndarray:
    try:
        name, shape, offset = description
        whole = all(type(n) is int and 0 <= n < 2**31 for n in (*shape, offset))
    except (TypeError, ValueError):
        raise WireError("an array without dtype, shape and offset") from None
    if not whole or len(shape) > 8 or not isinstance(name, str) or name not in DTYPES:
        raise WireError("an array of an unknown kind")
    dtype = np.dtype(name)
    count = math.prod(shape)
    if offset + count * dtype.itemsize > len(body):
        raise WireError("an array longer than its bytes")
    return np.frombuffer(body, dtype, count, offset).reshape(shape).copy()


class Channel:
    """A blocking connection that sends and receives messages: the rank's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = Decoder()
        self._waiting: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(encode(message))

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other end is closed."""
        while not self._waiting:
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            self._waiting += self._decoder.feed(data)
        return self._waiting.pop(0)
