"""YAML files: wrong entries are one line, keys are given once, underscores mark thousands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import Field

import forerun
from forerun.common import yaml_files
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import Entry, check, parse_yaml, read_any_yaml


class Inner(Entry):
    color: int = 0
    shape: int = 0


class Outer(Entry):
    inner: Inner = Inner()
    listed: list[Inner] = Field(default_factory=list)
    text: str = ""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": {"colour": 1}}, "here: unknown key 'inner.colour'; did you mean color? known: color, shape"),
        ({"listed": [{}, {"zzz": 1}]}, "here: unknown key 'listed.1.zzz'; known: color, shape"),
        ({"txt": ""}, "here: unknown key 'txt'; did you mean text? known: inner, listed, text"),
        ({"inner": 3}, "here: inner: expected keys and values, got 3"),
        ({"text": 3}, "here: text: input should be a valid string, got 3"),
        ({"text": 3, "inner": 3, "listed": 4}, "here: inner: expected keys and values, got 3 (and 2 more)"),
        ({"text": 3, "inner": 3}, "here: inner: expected keys and values, got 3 (and 1 more)"),
        ({"text": ["a" * 80]}, f"here: text: input should be a valid string, got ['{'a' * 55}..."),
        ({"text": ["a" * 56]}, f"here: text: input should be a valid string, got ['{'a' * 56}']"),
        ({"text": ["a" * 57]}, f"here: text: input should be a valid string, got ['{'a' * 55}..."),
        ({"text": 2**480}, "here: text: input should be a valid string, got a number of 481 bits"),
        ({"text": 2**480 - 1}, f"here: text: input should be a valid string, got {str(2**480 - 1)[:57]}..."),
        ({"text": list(range(19))}, f"here: text: input should be a valid string, got {str(list(range(19)))[:57]}..."),
    ],
)
def test_a_wrong_entry_is_one_line(data: dict[str, object], message: str) -> None:
    with pytest.raises(ForerunError) as caught:
        check(Outer, data, "here")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "value"), [("1_000", 1000), ("32_1_2", "32_1_2"), ("1_000_000", 1_000_000), ("1000_000", "1000_000")]
)
def test_underscores_mark_thousands_only(text: str, value: object) -> None:
    assert parse_yaml(f"a: {text}", "here") == {"a": value}


def test_mistakes_in_yaml_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"^here, line 3: not valid YAML: key 'a' is given twice"):
        parse_yaml("a: 1\nb: 2\na: 3\n", "here")
    with pytest.raises(ForerunError, match=r"^here: expected keys and values, got \[1\]"):
        parse_yaml("[1]", "here")
    assert parse_yaml("1: {<<: {a: 1}, b: 2}", "here") == {"1": {"a": 1, "b": 2}}
    (tmp_path / "list.yaml").write_text("[1, 2]")
    assert read_any_yaml(tmp_path / "list.yaml") == [1, 2]


SHIPPED = sorted(Path(forerun.__file__).parent.rglob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_both_parsers_read_shipped_files_alike(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    fast, plain = (repr(yaml.load(text, Loader=loader)) for loader in (yaml_files._FastLoader, yaml_files._Loader))
    assert fast == plain


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: [1, 2", "a: b: c", "\ta: 1", "a: \x01", "a: &b *c", "a: !!int x"])
def test_what_is_wrong_does_not_depend_on_the_parser(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ForerunError) as caught:
        parse_yaml(text, "here")
    monkeypatch.setattr(yaml_files, "_FastLoader", yaml_files._Loader)
    with pytest.raises(ForerunError) as plain:
        parse_yaml(text, "here")
    assert str(caught.value) == str(plain.value)


@pytest.mark.parametrize("depth", [2_000, 10_000, 1_000_000])
@pytest.mark.parametrize("opening", ["- ", "[", "{a: ", "? "])
def test_no_nesting_is_too_deep_to_be_told(opening: str, depth: int) -> None:
    with pytest.raises(ForerunError):
        parse_yaml(opening * depth, "here")


class _Numbers(Entry):
    share: float = 0.0
    number: int = 0


@pytest.mark.parametrize(
    ("text", "written"),
    [("share: 2e9", "2.0e+9"), ("share: 1.5E3", "1.5e+3"), ("share: -1e-9", "-1.0e-9"), ("number: 1e3", "1000")],
)
def test_numbers_that_yaml_takes_for_text_are_explained(text: str, written: str) -> None:
    with pytest.raises(ForerunError, match=r"YAML reads .* as text; write") as error:
        check(_Numbers, parse_yaml(text, "file"), "file")
    key = text.split(":")[0]
    assert str(error.value).endswith(f"write {written}")
    check(_Numbers, parse_yaml(f"{key}: {written}", "file"), "file")


def test_a_number_that_is_not_whole_is_no_text() -> None:
    with pytest.raises(ForerunError, match="got 1e-30"):
        check(_Numbers, parse_yaml("number: 1.0e-30", "file"), "file")
