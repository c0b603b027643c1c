"""Messages between the trusted side and a rank: plain data, and nothing that runs when it is read.

A message is a dictionary of JSON values in which an array may stand anywhere. On the wire:

    4 bytes   length of the JSON text, little-endian
    4 bytes   length of the arrays' bytes
    the JSON text, in which an array is {"$array": [dtype, shape]}
    the arrays' bytes, one after the other, in the order of the text

There is no pickle and no format that names a class. The reader believes nothing: lengths, types,
shapes, nesting and counts are bounded before anything is built, and what is wrong raises WireError.
An array has no offset: it begins where the one before it ends, so no byte counts twice, and reading
costs time and memory proportional to what was sent.
"""

import json
import math
import re
import socket
import struct
from typing import Any

import numpy as np

HEAD = struct.Struct("<II")
LARGEST = 256 * 2**20  # bytes of one message
MOST_VALUES = 2_000_000  # values, commas in texts included, of one message
LONGEST_TEXT = 64 * 2**20  # bytes of a message's JSON
# numpy has no bfloat16; its bits travel as a record that no arithmetic takes for a number.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])
_NUMBERS = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool"]
_NUMBERS += ["uint8", "uint16", "uint32", "uint64", "complex64", "complex128"]
DTYPES = {name: np.dtype(name) for name in _NUMBERS} | {"bfloat16": BFLOAT16}
_MARK = "$array"
_MOST_ELEMENTS = 2**31  # of an array, dimensions of length 0 left out
DEEPEST = 16  # levels of lists and dictionaries in one message
_OPENS_OR_SEPARATES = re.compile(rb"[\[{,]")


class WireError(ValueError):
    """What arrived is not a message."""


def dtype_name(array: np.ndarray) -> str:
    """The name of an array's dtype on the wire: a key of DTYPES, or numpy's own."""
    return "bfloat16" if array.dtype == BFLOAT16 else array.dtype.name


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
        name = dtype_name(value)
        if name not in DTYPES:
            raise TypeError(f"an array of {name}")
        if value.nbytes > LARGEST:
            raise TypeError(f"an array of {value.nbytes:,} bytes")
        blobs.append(value.tobytes())
        return {_MARK: [name, list(value.shape)]}
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

    def __init__(
        self, largest: int = LARGEST, deepest: int = DEEPEST, most_values: int = MOST_VALUES
    ) -> None:
        self._largest = largest
        self._deepest = deepest
        self._most_values = most_values
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Every message that `data` completes. Raises WireError."""
        self._pending += data
        messages = []
        start = 0
        while len(self._pending) - start >= HEAD.size:
            text, body = HEAD.unpack_from(self._pending, start)
            if text + body > self._largest or text > LONGEST_TEXT:
                raise WireError(f"a message of {text + body:,} bytes")
            begin = start + HEAD.size
            end = begin + text + body
            if len(self._pending) < end:
                break
            head = bytes(self._pending[begin : begin + text])
            arrays = bytes(self._pending[begin + text : end])
            messages.append(_Reader(arrays, self._deepest).read(head, self._most_values))
            start = end
        del self._pending[:start]
        return messages


class _Reader:
    """Reads one message. `_used` is how much of its arrays' bytes has been given away."""

    def __init__(self, body: bytes, deepest: int) -> None:
        self._body = body
        self._deepest = deepest
        self._used = 0

    def read(self, text: bytes, most_values: int) -> dict[str, Any]:
        # Counted before it is parsed: a list costs thirty times the bytes that it is written with.
        if sum(1 for _ in _OPENS_OR_SEPARATES.finditer(text)) > most_values:
            raise WireError(f"a message of more than {most_values:,} values")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise WireError("a message that is not JSON") from None
        if not isinstance(value, dict):
            raise WireError("a message that is not a dictionary")
        restored = self._restore(value, self._deepest)
        if type(restored) is not dict:
            raise WireError("a message that is an array")
        if self._used != len(self._body):
            raise WireError("bytes that belong to no array")
        return restored

    def _restore(self, value: Any, levels: int) -> Any:
        if levels < 0:
            raise WireError("data nested too deep")
        if isinstance(value, list):
            return [self._restore(item, levels - 1) for item in value]
        if isinstance(value, str):
            _look_at_text(value)
            return value
        if not isinstance(value, dict):
            return value
        if _MARK in value:
            return self._array(value[_MARK])
        for key in value:
            _look_at_text(key)
        return {key: self._restore(item, levels - 1) for key, item in value.items()}

    def _array(self, description: Any) -> np.ndarray:
        try:
            name, shape = description
            whole = all(type(n) is int and 0 <= n < 2**31 for n in shape)
        except (TypeError, ValueError):
            raise WireError("an array without dtype and shape") from None
        if not isinstance(name, str) or name not in DTYPES or not isinstance(shape, list):
            raise WireError("an array of an unknown kind")
        if not whole or len(shape) > 8 or math.prod(max(n, 1) for n in shape) > _MOST_ELEMENTS:
            raise WireError("an array of an impossible shape")
        dtype, count = DTYPES[name], math.prod(shape)
        start = self._used
        self._used += count * dtype.itemsize
        if self._used > len(self._body):
            raise WireError("an array longer than its bytes")
        return np.frombuffer(self._body, dtype, count, start).reshape(shape).copy()


def _look_at_text(text: str) -> None:
    """Half of a surrogate pair is valid JSON and can be written to no file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WireError("text that is not Unicode") from None


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
