"""Pickles of plain data: every code of containers and values, and what is refused without being run."""

import pickle
import struct
from fractions import Fraction

import pytest

from forerun.common.errors import ForerunError
from forerun.sources.profile import plain_pickle
from forerun.sources.profile.plain_pickle import read_plain_pickle

SHARED = ["again"]
VALUES = [
    None,
    True,
    False,
    *(
        sign * (2**bits + more)
        for sign in (1, -1)
        for bits in (0, 7, 8, 15, 16, 31, 32, 63, 64, 119)
        for more in (-1, 0)
    ),
    0.1,
    -1e300,
    float("inf"),
    "",
    "é" * 300,
    "\ud800",
    b"",
    b"\x00\xff" * 200,
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, 2, 3, 4),
    [],
    [1],
    [[], [[2]]],
    {},
    {"a": 1},
    {(1, "b"): [None, {"c": ()}], 2: 3},
    set(),
    {1, "a", (2,)},
    [SHARED, SHARED, {"x": SHARED}],
    list(range(3000)),
    {str(n): n for n in range(1500)},
]


def read(tmp_path, content):
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    return read_plain_pickle(path)


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_plain_values_are_read_as_python_reads_them(tmp_path, value, protocol):
    found = read(tmp_path, pickle.dumps(value, protocol))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("protocol", [2, 3])
def test_values_of_older_protocols(tmp_path, protocol):
    value = [1, 2**40, "a" * 300, (1, 2, 3, 4), {"b": [0.5, None]}, SHARED, SHARED]
    assert read(tmp_path, pickle.dumps(value, protocol)) == value


def test_what_is_there_twice_is_one_value(tmp_path):
    found = read(tmp_path, pickle.dumps([SHARED, SHARED], 4))
    assert found[0] is found[1]


def test_many_values_are_kept_under_numbers_of_four_bytes(tmp_path):
    texts = [f"text {n}" for n in range(400)]
    for protocol in (2, 4):
        assert read(tmp_path, pickle.dumps([*texts, *texts], protocol)) == [*texts, *texts]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x80\x02]K\x01a.", [1]),
        (b"\x80\x02K\x07K\x080.", 7),
        (b"\x80\x02}K\x01K\x02s.", {1: 2}),
        (b"\x80\x02(K\x01K\x02K\x03K\x04t.", (1, 2, 3, 4)),
        (b"\x80\x02B\x03\x00\x00\x00abc.", b"abc"),
        (b"\x80\x04\x8d\x03" + bytes(7) + b"abc.", "abc"),
        (b"\x80\x04\x8e\x03" + bytes(7) + b"abc.", b"abc"),
        (b"\x80\x02\x8a\x10" + b"\xff" * 15 + b"\x7f.", 2**127 - 1),
        (b"\x80\x02\x8a\x01\xff.", -1),
        (b"\x80\x02M\x34\x12.", 0x1234),
        (b"\x80\x02J\xfe\xff\xff\xff.", -2),
        (b"\x80\x02]r\x00\x01\x00\x00K\x05ah\x00.", None),
        (b"\x80\x02K\x05r\x00\x01\x00\x000j\x00\x01\x00\x00.", 5),
        (b"\x80\x02K\x05q\x090h\x09.", 5),
        (b"\x80\x04\x95" + bytes(8) + b"K\x05.", 5),
    ],
)
def test_codes_one_by_one(tmp_path, content, expected):
    if expected is None:
        with pytest.raises(ForerunError, match="a damaged pickle"):
            read(tmp_path, content)
    else:
        assert read(tmp_path, content) == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "ends before it is complete"),
        (b"\x80\x04K\x05", "ends before it is complete"),
        (b"\x80\x04K", "a damaged pickle"),
        (b"\x80\x04\x8c\x05abc.", "a value of 5 bytes at byte 3; is the file cut short"),
        (b"\x80\x02\x8a\x11" + bytes(17) + b".", "a value of 17 bytes"),
        (b"\x80\x04.", "which holds 0 values"),
        (b"\x80\x04K\x01K\x02.", "which holds 2 values"),
        (b"\x80\x04(.", "which holds 1 values"),
        (b"\x80\x04K\x01t.", "a damaged pickle"),
        (b"\x80\x04}(K\x01u.", "a damaged pickle"),
        (b"\x80\x04h\x07.", "a damaged pickle"),
        (b"\x80\x04K\x01K\x02a.", "a damaged pickle"),
        (b"\x80\x04\x8c\x01\xff.", "a damaged pickle"),
        (b"cos\nsystem\n(S'true'\ntR.", "asks for more than plain data (code 'c' at byte 0); nothing of it was run"),
        (pickle.dumps(Fraction(1, 2), 4), "asks for more than plain data"),
        (pickle.dumps(frozenset({1}), 4), "asks for more than plain data"),
        (pickle.dumps(bytearray(b"a"), 5), "asks for more than plain data"),
        (pickle.dumps(struct.Struct, 4), "asks for more than plain data"),
    ],
)
def test_what_is_no_plain_data_is_one_line(tmp_path, content, problem):
    with pytest.raises(ForerunError) as caught:
        read(tmp_path, content)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_are_counted(tmp_path, monkeypatch):
    content = b"\x80\x02]K\x01a."
    monkeypatch.setattr(plain_pickle, "_MOST_VALUES", 5)
    assert read(tmp_path, content) == [1]
    monkeypatch.setattr(plain_pickle, "_MOST_VALUES", 4)
    with pytest.raises(ForerunError, match="more than 4 values"):
        read(tmp_path, content)
