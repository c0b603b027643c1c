"""What travels between a rank and the trusted side is plain data, and the reader trusts nothing."""

import contextlib
import json
import pickle
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from grader.check import difference
from grader.inside.wire import DTYPES, HEAD, Decoder, WireError, encode
from grader.router import _OPS, _WITHOUT_ALL, Router

KINDS = ["collective", "store", "waits", "gate", "returned", "raised", "", "verdict"]
FIELDS = ["kind", "op", "reduce", "root", "peer", "tag", "group", "members", "tensors", "expects"]
FIELDS += ["number", "for", "keys", "value", "amount", "name", "which", "step"]

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
        frame(array_of("object", [1]), b"x" * 64),
        frame(array_of("float32", [1000]), b"x" * 64),
        frame(array_of("float32", [-1]), b"x" * 64),
        frame(array_of("float32", [1], 4), b"x" * 64),
        frame(array_of("float32", [True]), b"x" * 64),
        frame(array_of("float32", [2**40, 0]), b"x" * 64),
        frame(array_of("float32", [0, 2**31 - 1, 2**31 - 1])),
        frame(array_of("float32", [1]), b"x" * 64),
        frame(array_of("float32", "11"), b"x" * 4),
        frame(array_of(["float32"], [1]), b"x" * 4),
        frame(array_of("float32")),
        frame(b'{"$array": ["float32", [0]]}'),
        frame(b'{"a": [' + b"[]," * 3_000_000 + b"1]}"),
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
    assert all(not dtype.hasobject for dtype in DTYPES.values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*FIELDS, "$array"]), inner, max_size=6)
    ),
    max_leaves=20,
)


@given(JSON, st.binary(max_size=40), st.sampled_from(KINDS))
def test_whatever_a_rank_says_is_taken_or_refused_and_nothing_else_happens(value, body, kind):
    """As the trusted side does it: decoded with its limits, then handed to the router."""
    message = value if isinstance(value, dict) else {"value": value}
    text = json.dumps({**message, "kind": kind}).encode()
    router = Router(2, [{"a": 1.0}] * 2)
    try:
        for one in Decoder(2**20, 15, 1000).feed(frame(text, body)):
            router.take(0, one)
            encode(one)
    except WireError:
        pass


@given(st.data())
def test_messages_of_the_right_form_with_any_values_are_taken_or_refused(data):
    router = Router(3, [{"a": 1.0}] * 3)
    small = st.integers(-2, 4)
    for number in range(data.draw(st.integers(1, 8))):
        message = {
            "kind": data.draw(st.sampled_from(["collective", "store", "waits", "gate"])),
            "op": data.draw(st.sampled_from([*_OPS, *_WITHOUT_ALL, "set", "get", "add", "wait"])),
            "reduce": data.draw(st.sampled_from(["", "SUM", "AVG", "BAND"])),
            "root": data.draw(st.none() | small),
            "peer": data.draw(st.none() | small),
            "tag": data.draw(small),
            "group": "",
            "members": data.draw(st.lists(small, max_size=3)),
            "tensors": data.draw(st.lists(ARRAYS, max_size=3)),
            "expects": data.draw(st.none() | st.lists(small, max_size=3)),
            "number": number,
            "for": data.draw(small),
            "keys": ["a"],
            "value": np.frombuffer(b"1", np.uint8),
            "amount": data.draw(small),
            "name": "a",
        }
        with contextlib.suppress(WireError):
            router.take(data.draw(st.integers(0, 2)), message)
    assert all(isinstance(reply, dict) for _, reply in router.replies)


def test_encoding_costs_time_in_proportion_to_what_is_sent():
    def seconds(arrays):
        message = {"tensors": [np.ones(1, "float32")] * arrays}
        taken = []
        for _ in range(3):
            started = time.process_time()
            encode(message)
            taken.append(time.process_time() - started)
        return min(taken)

    # Ten times as many arrays; a quadratic encoder would take a hundred times as long.
    assert seconds(80_000) < 40 * max(seconds(8_000), 0.005)


def test_no_byte_of_an_array_counts_twice():
    text = json.dumps({"a": [{"$array": ["float32", [250_000]]}] * 150}).encode()
    with pytest.raises(WireError, match="longer than its bytes"):
        Decoder().feed(frame(text, bytes(10**6)))


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
        (
            {"a": np.ones(1), "b": np.array([1.0005e-2])},
            {"a": np.ones(1), "b": np.array([1e-2])},
            None,
        ),
        (
            {"a": np.ones(1), "b": np.array([2e-6])},
            {"a": np.ones(1), "b": np.array([1e-6])},
            "['b'][0]",
        ),
        (
            {"a": np.full(1, 1e3), "b": np.zeros(1)},
            {"a": np.full(1, 1e3), "b": np.array([9e-3])},
            "['b'][0]",
        ),
        (
            {"a": np.ones(1), "b": np.ones(1)},
            {"a": np.array([np.inf]), "b": np.full(1, 5.0)},
            "['a'][0]",
        ),
        (
            {"a": np.ones(1), "b": np.full(1, np.inf)},
            {"a": np.ones(1), "b": np.full(1, np.inf)},
            "['b'][0]",
        ),
        (
            {"b": np.full(1, 5.0), "a": np.full(1, np.inf)},
            {"b": np.ones(1), "a": np.full(1, np.inf)},
            "['b'][0]",
        ),
        (
            {"a": np.ones(1), "b": np.array([2e-4])},
            {"a": np.ones(1), "b": np.array([1e-4])},
            "['b'][0]",
        ),
        ({"a": np.ones(1), "b": 2e-6}, {"a": np.ones(1), "b": 1e-6}, "['b']"),
        (
            {"n": np.array([9**9]), "b": np.array([2.0])},
            {"n": np.array([9**9]), "b": np.ones(1)},
            "['b'][0]",
        ),
    ],
)
def test_the_first_difference_is_named(got, want, place):
    assert difference(got, want, 1e-5) == place
