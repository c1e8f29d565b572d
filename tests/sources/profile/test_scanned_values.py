"""Values of JSON as bytes: where they end and which numbers they are. The functions run here without being compiled."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.sources.profile import scan_values


@pytest.fixture(autouse=True, scope="module")
def _plain():
    """Functions that the scanner calls run as plain Python too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("text_end", "real_number"):
            patch.setattr(scan_values, name, getattr(scan_values, name).py_func)
        yield


def of(name, text, *more):
    buffer = np.frombuffer(text.encode(), np.uint8)
    function = getattr(scan_values, name)
    function = getattr(function, "py_func", function)
    with np.errstate(over="ignore"):
        return function(buffer, *(more or (0, len(buffer))))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0.0),
        ("-7", -7.0),
        ("12.5", 12.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e3", 1000.0),
        ("1E+2", 100.0),
        ("25e-1", 2.5),
        ("-1.5e2", -150.0),
        ("1e-3", 0.001),
        ("", None),
        ("-", None),
        (".", None),
        ("abc", None),
        ("1x", None),
        ("1.2.3", None),
        ("1e3x", None),
        ("e5", None),
        ("1 ", None),
    ],
)
def test_real_numbers(text, expected):
    ok, value = of("real_number", text)
    assert (value if ok else None) == (None if expected is None else pytest.approx(expected, rel=1e-15))


@given(st.floats(-1e15, 1e15))
def test_any_real_number_is_read(value):
    ok, found = of("real_number", repr(value))
    assert ok == 1
    assert found == pytest.approx(value, rel=1e-14, abs=1e-300)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", (1, 0, 0)),
        ("12", (1, 12_000, 0)),
        ("-3", (1, -3_000, 0)),
        ("1.5", (1, 1_500, 1)),
        ("1.234", (1, 1_234, 1)),
        ("1.2344", (1, 1_234, 1)),
        ("1.2345", (1, 1_235, 1)),
        ("1.23459", (1, 1_235, 1)),
        ("1.23449", (1, 1_234, 1)),
        ("-0.001", (1, -1, 1)),
        ("7.0", (1, 7_000, 1)),
        ("1e3", (1, 10**6, 1)),
        ("1.5e-1", (1, 150, 1)),
        ("9000000000000000", (1, 9 * 10**18, 0)),
        ("9000000000000001", None),
        ("9e15", None),
        ("8.9e15", (1, 89 * 10**17, 1)),
        ("-9e15", None),
        ("1" * 19, None),
        ("0" * 18, (1, 0, 0)),
        ("0" * 19, None),
        ("", None),
        ("-", None),
        ("1.", None),
        (".5", None),
        ("1x", None),
    ],
)
def test_microseconds_become_nanoseconds(text, expected):
    found = of("nanoseconds", text)
    assert found == expected if expected else found[0] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("-12", -12),
        ("9" * 18, 10**18 - 1),
        ("1" + "0" * 18, 10**18),
        ("8" + "0" * 18, 8 * 10**18),
        ("9" + "0" * 18, None),
        ("1" * 20, None),
        ("3.9", 3),
        ("-3.9", -3),
        ("1e3", 1000),
        ("1e19", None),
        ("", None),
        ("-", None),
        ("x", None),
        ("12x", None),
    ],
)
def test_whole_numbers(text, expected):
    ok, value = of("whole_number", text)
    assert (int(value) if ok else None) == expected


@pytest.mark.parametrize(
    ("text", "place"), [("  \t\n\r x", 6), ("x", 0), ("   ", 3), ("", 0), ("\x0e", 0), ("\x08", 0)]
)
def test_white_space_is_skipped(text, place):
    assert of("skip_space", text) == place


@pytest.mark.parametrize(
    ("text", "place"),
    [('abc"', 3), ('"', 0), ('a\\"b"', 4), ('a\\\\"', 3), ("abc", -1), ("abc\\", -1), ("", -1), ('\\"', -1)],
)
def test_texts_end_at_their_quote(text, place):
    assert of("text_end", text) == place


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("12,", 2),
        ("12}", 2),
        ("12]", 2),
        ("12 ", 2),
        ("true\n", 4),
        ("12", -1),
        ('"a,b"', 5),
        ('"a', -1),
        ("{}", 2),
        ("[1, [2], {}] x", 12),
        ('{"a": "}"}', 10),
        ('{"a": "', -1),
        ("[1", -1),
        ("}", -2),
        ("]", -2),
        (",", -2),
        (" 1,", -2),
        ("", -1),
    ],
)
def test_values_end_where_json_says(text, place):
    assert of("value_end", text) == place


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(values, st.sampled_from([",", "}", "]", "\n"]))
def test_any_value_ends_where_it_was_written(value, behind):
    text = json.dumps(value)
    assert of("value_end", text + behind) == len(text.encode())
