"""What no file can mean is refused in one line, before anything is made of it."""

import io
import json
import os
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.admission import DEEPEST, admit, opened, parse_json, read_rows, read_text
from forerun.common.array_files import read_arrays
from forerun.common.errors import ForerunError, UnknownName, bounded
from forerun.common.yaml_files import parse_any_yaml

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_json_of_plain_values_is_read_as_it_is(value):
    assert parse_json(json.dumps(value), "here") == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": [1, NaN]}', "here: a.1: the number nan is not finite"),
        ('{"a": {"b": -Infinity}}', "here: a.b: the number -inf is not finite"),
        ('{"a": 1e999}', "here: a: the number inf is not finite"),
        (f'{{"a": {2**63}}}', "here: a: a whole number of 64 bits"),
        (f'{{"a": {-(2**70)}}}', "here: a: a whole number of 71 bits"),
        ('{"a": "\\ud800"}', r"here: a: the text has half a character \(.ud800\)"),
        ('{"a\\u0000": 1}', "the text has a NUL character"),
        ('{"' + "k" * 5000 + '": 1}', "the key has 5,000 characters"),
        ("[" * 100 + "]" * 100, f"lies more than {DEEPEST} levels deep"),
        ("[" * 100_000, "here: not JSON"),
        ('{"a": 1, "b": 2, "a": 3}', "here: key 'a' is given twice"),
    ],
)
def test_what_json_cannot_mean_is_told_with_its_place(text, said):
    with pytest.raises(ForerunError, match=said) as caught:
        parse_json(text, "here")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_a_file_of_others_may_hold_numbers_that_nobody_uses():
    assert parse_json('{"time_step_limit": [0.0, Infinity]}', "config.json", any_number=True)


@pytest.mark.parametrize("value", [{1, 2}, b"x", (1,), object()])
def test_values_of_other_types_mean_nothing(value):
    with pytest.raises(ForerunError, match=r"a: a value of the type \w+ means nothing here"):
        admit({"a": value}, "here")


def bomb(levels):
    lines = ["a0: &a0 [x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merge_bomb(levels):
    lines = ["a0: &a0 {k: 1}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [bomb(9), merge_bomb(9), bomb(40), merge_bomb(40)])
def test_aliases_do_not_make_a_short_text_a_long_one(text):
    with pytest.raises(ForerunError, match=r"here, line \d: aliases repeat more than 100,000 values"):
        parse_any_yaml(text, "here")


def test_aliases_and_merge_keys_are_read():
    text = "base: &b {tp: 2, pp: 4}\none: {<<: *b, tp: 8}\ntwo: [*b, *b]"
    assert parse_any_yaml(text, "here") == {
        "base": {"tp": 2, "pp": 4},
        "one": {"tp": 8, "pp": 4},
        "two": [{"tp": 2, "pp": 4}] * 2,
    }


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: {c: *a}}", "&a [1, [*a]]", "a: &a {<<: *a}"])
def test_a_value_does_not_contain_itself(text):
    with pytest.raises(ForerunError, match="here, line 1: a value contains itself"):
        parse_any_yaml(text, "here")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
@pytest.mark.parametrize("long", [0, 50_000])
def test_nesting_ends_for_short_and_for_long_texts(opening, long):
    with pytest.raises(ForerunError, match="levels deep"):
        parse_any_yaml(f"# {'x' * long}\n" + opening * (DEEPEST + 40), "here") if opening == "- " else parse_any_yaml(
            f"# {'x' * long}\n" + opening * 200 + {"[": "]", "{a: ": "}"}[opening] * 200, "here"
        )


@pytest.mark.parametrize(
    "text",
    [
        *("a: .nan", "a: -.inf", "a: !!binary eA==", "a: !!set {x}", "a: !!int ''", "a: !!timestamp x", "a: !!float x"),
        *("a: !!bool x", "a: 1" + ":59" * 400 + ".5", "a: 2024-99-99", "a: !!python/object:os.system {}"),
    ],
)
def test_odd_yaml_is_one_line(text):
    with pytest.raises(ForerunError, match="here") as caught:
        parse_any_yaml(text, "here")
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_and_line_ends_of_other_systems_are_no_content(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r")
    assert read_text(tmp_path / "a") == "a: 1\nb: 2\n"


def test_only_regular_files_of_a_bounded_size_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"12345")
    for path, said in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), ("/dev/zero", "a device")):
        with pytest.raises(ForerunError, match=f"can't be read: it is {said}; give a regular file"):
            read_text(path)
    with pytest.raises(ForerunError, match="has 5 bytes; at most 4 are read"), opened(tmp_path / "large", 4):
        pass
    with pytest.raises(ForerunError, match="more than 4 bytes"):
        read_text("/proc/self/status", 4)


def test_rows_of_a_table_come_with_their_lines(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfa,b\r\n\r\n"1\n2",3\n')
    assert list(read_rows(path)) == [(1, ["a", "b"]), (4, ["1\n2", "3"])]
    for content, said in ((b'a\n"b', "line 2: not CSV"), (b"a\n\xff", "not UTF-8"), (b"a\n" + b"x" * 200_000, "field")):
        path.write_bytes(content)
        with pytest.raises(ForerunError, match=said):
            list(read_rows(path))


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def archive(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


HEADER = npy(np.frombuffer(b'{"a": 1}', np.uint8))


def test_arrays_are_read_with_their_header(tmp_path):
    path = archive(tmp_path / "a", {"header.npy": HEADER, "x.npy": npy(np.arange(6).reshape(2, 3).T)})
    header, arrays = read_arrays(path, "a test")
    assert header == {"a": 1}
    np.testing.assert_array_equal(arrays["x"], np.arange(6).reshape(2, 3).T)


@pytest.mark.parametrize(
    "member",
    [
        npy(np.array([object()])),
        npy(np.array(["text"])),
        npy(np.zeros(4))[:-1],
        npy(np.zeros(4)) + b"more",
        npy(np.zeros(4)).replace(b"(4,)", b"(9,)"),
        npy(np.zeros(4)).replace(b"(4,), }", b"(-4,), "),
        b"no array",
    ],
)
def test_members_that_are_no_arrays_of_numbers_are_refused(tmp_path, member):
    path = archive(tmp_path / "a", {"header.npy": HEADER, "x.npy": member})
    with pytest.raises(ForerunError, match="damaged or not a test"):
        read_arrays(path, "a test")


def test_an_archive_that_grows_is_refused_before_it_does(tmp_path):
    zeros = bytes(1 << 26)
    path = archive(tmp_path / "a", {"header.npy": HEADER} | {f"{n}.npy": zeros for n in range(9)})
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ForerunError, match="unpacks to 603,979,912 bytes; at most 536,870,912 are read"):
        read_arrays(path, "a test")


def test_messages_have_a_bound():
    assert bounded("abc") == "abc"
    assert len(bounded("x" * 10**6)) < 5000
    assert len(str(UnknownName("stack", "x" * 10**6, ["a", "b"]))) < 400
