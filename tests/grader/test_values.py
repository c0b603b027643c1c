"""Values from a sandbox: whatever bytes come, they are a value within bounds or refused."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.inside.values import LARGEST, MOST_TEXT, ValuesError, pack, unpack

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def archive(text, compression=zipfile.ZIP_STORED, **arrays):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as members:
        for name, data in {"text": npy(np.frombuffer(text.encode(), np.uint8)), **arrays}.items():
            members.writestr(f"{name}.npy", data)
    return file.getvalue()


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def test_a_value_comes_back_as_it_was_sent():
    value = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": [None, True, 1, 2.5, "x"]}
    back = unpack(pack(value))
    assert back["b"] == value["b"]
    assert back["a"].dtype == "float32"
    assert np.array_equal(back["a"], value["a"])


@given(PLAIN)
def test_plain_values_survive(value):
    if "$array" not in json.dumps(value):
        assert unpack(pack(value)) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04N.",
        archive("[" * 5000),
        archive("[" * 50 + "]" * 50),
        archive('{"$array": "x"}'),
        archive('{"$array": ["x"]}'),
        archive("1", compression=zipfile.ZIP_DEFLATED),
        archive("1", x=npy(np.array([{}], object), allow_pickle=True)),
        archive("1", x=npy(np.array(["text"]))),
        archive("1", x=npy(np.ones(3)).replace(b"(3,)", b"(9,)")),
        archive("1", x=npy(np.ones(3)).replace(b"(3,), }" + b" " * 11, b"(999999999999,), }")),
        archive(
            "1", x=b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1"
        ),
    ],
)
def test_what_is_no_value_is_refused(data):
    with pytest.raises(ValuesError):
        unpack(data)


def test_what_is_too_large_or_no_data_is_not_packed():
    circle = []
    circle.append(circle)
    for value in (np.zeros(LARGEST, np.uint8), object(), circle, np.array([{}], object)):
        with pytest.raises(ValuesError):
            pack(value)


@pytest.mark.parametrize("value", [{"k" * 300: [1]}, [1] * 30_000, ["x" * MOST_TEXT]])
def test_an_answer_has_limits_of_its_own(value):
    with pytest.raises(ValuesError):
        unpack(pack(value), MOST_TEXT)


def test_members_of_an_archive_that_overlap_are_refused():
    file = io.BytesIO()
    np.savez(file, a=np.zeros(1000), b=np.zeros(1000))
    data = bytearray(file.getvalue())
    with zipfile.ZipFile(file) as archive:
        places = [one.header_offset for one in archive.infolist()]
    second = data.rindex(b"PK\x01\x02")
    data[second + 42 : second + 46] = struct.pack("<I", places[0])
    many = bytes(data[: data.index(b"PK\x01\x02")])
    entry = bytes(data[data.index(b"PK\x01\x02") : second])
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 9, 9, 9 * len(entry), len(many), 0)
    with pytest.raises(ValuesError):
        unpack(many + 9 * entry + end)
