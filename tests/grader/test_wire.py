"""What travels between a rank and the trusted side is plain data, and the reader trusts nothing."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from grader.check import difference
from grader.inside.wire import DTYPES, HEAD, Decoder, WireError, encode

ARRAYS = hnp.arrays(
    st.sampled_from(["float32", "int64", "bool", "uint8"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
KEYS = st.text().filter(lambda key: key != "$array")  # which stands for an array, and is refused
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False) | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def same(left, right) -> bool:
    if isinstance(left, np.ndarray):
        return (left.dtype == right.dtype and np.array_equal(left, right, equal_nan=False)) or (
            left.tobytes() == right.tobytes() and left.shape == right.shape
        )
    if isinstance(left, dict):
        return set(left) == set(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@given(st.dictionaries(KEYS, PLAIN, max_size=4), st.integers(1, 50))
def test_a_message_arrives_as_it_was_sent_in_pieces_of_any_size(message, size):
    data, decoder, found = encode(message), Decoder(), []
    for start in range(0, len(data), size):
        found += decoder.feed(data[start : start + size])
    assert len(found) == 1
    assert same(found[0], message)


class Sly(np.ndarray):
    pass


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2}, b"bytes", {"$array": [1]}, np.array([None]), np.zeros(2).view(Sly), 1j],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_data_is_not_sent(value):
    with pytest.raises(TypeError):
        encode({"value": value})


def frame(text: bytes, body: bytes = b"") -> bytes:
    return HEAD.pack(len(text), len(body)) + text + body


def array_of(*description) -> bytes:
    return json.dumps({"value": {"$array": list(description)}}).encode()


@pytest.mark.parametrize(
    "data",
    [
        frame(b"not json"),
        frame(b"[]"),
        frame(b"[" * 100_000),
        frame(b'{"a": ' * 40 + b"1" + b"}" * 40),
        frame(b'{"number": ' + b"9" * 10_000 + b"}"),
        frame(b'{"text": "\\ud800"}'),
        frame(b'{"\\ud800": 1}'),
        frame(pickle.dumps({"value": 1})),
        frame(array_of("object", [1], 0), b"x" * 64),
        frame(array_of("float32", [1000], 0), b"x" * 64),
        frame(array_of("float32", [-1], 0), b"x" * 64),
        frame(array_of("float32", [1], -4), b"x" * 64),
        frame(array_of("float32", [True], 0), b"x" * 64),
        frame(array_of("float32", [2**40, 0], 0), b"x" * 64),
        frame(array_of("float32")),
        HEAD.pack(2**32 - 1, 2**32 - 1),
    ],
)
def test_what_is_not_a_message_is_refused(data):
    with pytest.raises(WireError):
        Decoder().feed(data)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_anything_else_happen(data):
    try:
        messages = Decoder().feed(data)
    except WireError:
        return
    assert all(isinstance(message, dict) for message in messages)


def test_no_dtype_can_hold_an_object():
    assert all(not np.dtype(name).hasobject for name in DTYPES)


@pytest.mark.parametrize(
    ("got", "want", "place"),
    [
        (np.ones(3), np.ones(3), None),
        (np.ones(3) + 1e-7, np.ones(3), None),
        (np.array([1.0, 2.0]), np.array([1.0, 3.0]), "[1]"),
        (np.array([[1.0, np.nan]]), np.ones((1, 2)), "[0, 1]"),
        (np.array([np.inf]), np.array([1.0]), "[0]"),
        (np.ones((3, 1)), np.ones(3), ""),
        ([1.0, 1.0], np.ones(2), ""),
        ({"a": 1}, {"a": 1, "b": None}, ""),
        ({"a": None}, {"a": np.ones(1)}, "['a']"),
        ({"a": np.ones(1)}, {"a": None}, "['a']"),
        (True, 1, ""),
        (1, 1.0, None),
        (float("nan"), 1.0, ""),
        (10**400, 1.0, ""),
        (1, 1e308, ""),
        ("a", "a", None),
        ([1, 2], [1, 3], "[1]"),
        (np.array([2**40]), np.array([2**40 + 1]), "[0]"),
    ],
)
def test_the_first_difference_is_named(got, want, place):
    assert difference(got, want, 1e-5) == place
