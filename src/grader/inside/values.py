"""Values between the trusted side and a sandbox: `.npz` without pickle, and within bounds.

A value is a number, a string, None, a list, a dictionary, or an array, nested in any way. The text
of everything but the arrays is JSON. Whoever unpacks treats the sender as hostile.
"""

import io
import json
import math
import zipfile
from typing import Any

import numpy as np

LARGEST = 16 * 2**20  # bytes of a packed value
MOST_TEXT = 2**20  # bytes of the text of an answer
_TEXT = "text"
_ARRAY = "$array"
_MOST_PARTS = 20_000  # arrays, numbers, strings, lists, and dictionaries of one value
_LONGEST_KEY = 200  # characters
_DEEPEST = 20
_NOT_ONE = (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, MemoryError)
_NOT_ONE += (RecursionError, zipfile.BadZipFile)


class ValuesError(ValueError):
    """The bytes are not a packed value, or the value cannot be packed; the text says why."""


def pack(value: Any) -> bytes:
    """`value` as the bytes of an uncompressed .npz. Tensors become arrays, tuples lists.

    Raises ValuesError if it holds anything else, or is too large.
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_plain(value, arrays, 0))
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{_TEXT: np.frombuffer(text.encode(), np.uint8)}, **arrays)
    data = file.getvalue()
    if len(data) > LARGEST:
        raise ValuesError(f"it has {len(data):,} bytes; {LARGEST:,} are allowed")
    return data


def unpack(data: bytes, most_text: int = LARGEST) -> Any:
    """The value in `data`. Raises ValuesError for anything that `pack` would not write.

    `most_text`: bytes of the text of everything but the arrays.
    """
    if len(data) > LARGEST:
        raise ValuesError(f"{len(data):,} bytes; {LARGEST:,} are allowed")
    try:
        arrays = _arrays(data)
        packed = arrays.pop(_TEXT)
        if packed.nbytes > most_text:
            raise ValuesError(f"{packed.nbytes:,} bytes of text; {most_text:,} are allowed")
        text = json.loads(packed.tobytes())
    except ValuesError:
        raise
    except _NOT_ONE as error:
        raise ValuesError(f"not a packed value: {type(error).__name__}") from None
    return _restored(text, arrays, [_MOST_PARTS])


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        members = archive.zip.infolist()
        # What is stored as it is cannot grow; what is compressed could fill the memory.
        if any(one.compress_type != zipfile.ZIP_STORED for one in members):
            raise ValueError("compressed")
        # Members that overlap would be read again and again.
        if len(members) > _MOST_PARTS or sum(one.file_size for one in members) > len(data):
            raise ValueError("too many arrays, or too large ones")
        found = dict(archive)
    if any(array.dtype.kind not in "biufc" for array in found.values()):
        raise ValueError("an array of another kind than numbers")
    return found


def _plain(value: Any, arrays: dict[str, np.ndarray], depth: int) -> Any:
    if depth > _DEEPEST or len(arrays) > _MOST_PARTS:
        raise ValuesError("it is nested too deeply, or has too many parts")
    if hasattr(value, "detach"):  # a tensor, without an import of torch
        value = value.detach().cpu()
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise ValuesError(f"an array of {value.dtype}")
        name = str(len(arrays))
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, dict):
        return {str(key): _plain(one, arrays, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, arrays, depth + 1) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValuesError(f"a {type(value).__name__}, which is neither a number nor a tensor")


def _restored(text: Any, arrays: dict[str, np.ndarray], left: list[int], depth: int = 0) -> Any:
    """The value that `text` and `arrays` make; `left[0]` counts down the parts that it may have."""
    left[0] -= 1
    if depth > _DEEPEST or left[0] < 0:
        raise ValuesError("it is nested too deeply, or has too many parts")
    if isinstance(text, list):
        return [_restored(one, arrays, left, depth + 1) for one in text]
    if not isinstance(text, dict):
        return text
    if _ARRAY not in text:
        if any(len(key) > _LONGEST_KEY for key in text):
            raise ValuesError(f"a name of more than {_LONGEST_KEY} characters")
        return {key: _restored(one, arrays, left, depth + 1) for key, one in text.items()}
    name = text[_ARRAY]
    if not isinstance(name, str) or name not in arrays:
        raise ValuesError("an array that is not there")
    return arrays[name]
