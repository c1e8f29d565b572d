"""Fields: reads the values of one mapping from a file, and checks types, bounds and unknown keys.

config.json files, preset files and architecture tables all use it, so their errors look alike. An error is one line
that names the place (file and section), the key, and the mistake.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forerun.common.admission import parse_json, read_text
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import read_any_yaml

_REQUIRED = -1
LARGEST = 10**9
"""largest count or width; every real model lies far below, and larger numbers overflow in later products"""
_SHOWN_CHARACTERS = 60
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}")


def exponent_number(value: Any) -> Any:
    """Returns the number of a text such as 1e9, which YAML 1.1 reads as text as it lacks a point or an exponent's
    sign; returns every other value unchanged."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


class Fields:
    """The keys of `values`; error messages begin with `place`."""

    def __init__(self, values: Mapping[str, object], place: str) -> None:
        self._values = values
        self._known: set[str] = set()
        self.place = place

    def error(self, key: str, problem: str) -> ForerunError:
        """Returns the error to raise about `key`."""
        return ForerunError(f"{self.place}: {key} {problem}")

    def stated(self, key: str) -> bool:
        """Returns whether `key` is there and not null."""
        self._known.add(key)
        return self._values.get(key) is not None

    def present(self, key: str) -> bool:
        """Returns whether `key` is there, null included."""
        self._known.add(key)
        return key in self._values

    def is_text(self, key: str) -> bool:
        """Returns whether `key` holds a text, for keys that take several types."""
        return isinstance(self._values.get(key), str)

    def is_whole(self, key: str) -> bool:
        """Returns whether `key` holds a whole number, for keys that take several types."""
        value = self._values.get(key)
        return isinstance(value, int) and not isinstance(value, bool)

    def value(self, key: str) -> object:
        """Returns the unchecked value of `key`. Returns None if the key is missing."""
        self._known.add(key)
        return self._values.get(key)

    def names(self) -> list[str]:
        """Returns every key, and counts all of them as read."""
        names = [str(key) for key in self._values]
        self._known.update(names)
        return names

    def is_list(self, key: str) -> bool:
        """Returns whether `key` holds a list, for keys that take several types."""
        return isinstance(self._values.get(key), list)

    def is_zero(self, key: str) -> bool:
        """Returns whether `key` holds the number 0."""
        value = exponent_number(self._values.get(key))
        return isinstance(value, int | float) and not isinstance(value, bool) and value == 0

    def integer(self, key: str, default: int = _REQUIRED, least: int = 1, most: int = LARGEST) -> int:
        """Reads a whole number from `least` to `most`. A missing key without a default is an error."""
        if not self.stated(key):
            if default == _REQUIRED:
                raise self._missing(key, "a whole number")
            return default
        value = self._values[key]
        if isinstance(value, str):
            number = exponent_number(value)
            value = int(number) if isinstance(number, float) and number.is_integer() else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number")
        if value < least:
            raise self.error(key, f"must be at least {least}, got {_shown(value)}")
        if value > most:
            raise self.error(key, f"must be at most {most}, got {_shown(value)}")
        return value

    def limit(self, keys: Iterable[str], most: int, what: str) -> None:
        """Raises ForerunError if one of `keys` holds more than `most`; no key counts as read."""
        for key in keys:
            value = exponent_number(self._values.get(key))
            if isinstance(value, int | float) and value > most:
                raise self.error(key, f"is {value:,.0f}; at most {most:,} {what}")

    def number(self, key: str) -> float | None:
        """Reads a positive number; None if it is not stated."""
        value = self._number(key)
        if value is not None and not 0 < value < float("inf"):
            raise self.error(key, f"must be positive, got {value:g}")
        return value

    def probability(self, key: str) -> float | None:
        """Reads a number from 0 to 1; None if it is not stated."""
        value = self._number(key)
        if value is not None and not 0 <= value <= 1:
            raise self.error(key, f"must be from 0 to 1, got {value:g}")
        return value

    def _number(self, key: str) -> float | None:
        if not self.stated(key):
            return None
        value = exponent_number(self._values[key])
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Reads true or false."""
        if not self.stated(key):
            return default
        value = self._values[key]
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None, choices: Iterable[str] = ()) -> str:
        """Reads a text, one of `choices` where there are any. A missing key without a default is an error."""
        if not self.stated(key):
            if default is None:
                raise self._missing(key, "a text")
            return default
        value = self._values[key]
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        known = list(choices)
        if known and value not in known:
            raise self.error(key, f"{value!r} is not known; known: {', '.join(known)}")
        return value

    def items(self, key: str) -> list[object]:
        """Reads a list; empty if it is missing."""
        if not self.stated(key):
            return []
        value = self._values[key]
        if not isinstance(value, list | tuple):
            raise self._wrong(key, "a list")
        return list(value)

    def section(self, key: str) -> Fields | None:
        """Reads a mapping inside this one as Fields; None if it is not stated."""
        if not self.stated(key):
            return None
        value = self._values[key]
        if not isinstance(value, Mapping):
            raise self._wrong(key, "a mapping")
        return Fields(value, f"{self.place}, in {key}")

    def mapping(self, key: str) -> dict[str, Any]:
        """Reads the mapping under `key` as a dict, empty if it is not stated."""
        section = self.section(key)
        return dict(section._values) if section else {}

    def expect(self, key: str, *allowed: object) -> None:
        """Raises ForerunError for a value other than those supported; a key that is not stated passes."""
        if self.stated(key) and not any(_same(self._values[key], value) for value in allowed):
            known = " or ".join(json.dumps(value) for value in allowed)
            raise self.error(key, f"{_shown(self._values[key])} is not supported, only {known}")

    def first_of(self, *keys: str) -> str:
        """Returns the name of a key, among several names, that the file uses. Returns the first name if it uses
        none.
        """
        stated = [key for key in keys if self.stated(key)]
        if any(not _same(self._values[key], self._values[stated[0]]) for key in stated):
            raise self.error(" and ".join(stated), "mean the same and differ; state one of them")
        return stated[0] if stated else keys[0]

    def unread(self, ignored: Iterable[str] = ()) -> list[str]:
        """Returns the keys that nothing has read and that are not in `ignored`, in order."""
        known = self._known | set(ignored)
        return [str(key) for key in self._values if key not in known]

    def refuse_misspelt(self, unread: Iterable[str]) -> None:
        """Raises ForerunError for a key of `unread` that is almost one which was looked for and is not there."""
        known = sorted(self._known)
        wanted = [key for key in known if key not in self._values]
        for key in unread:
            near = difflib.get_close_matches(key, wanted, 1, 0.88) or difflib.get_close_matches(key, known, 1, 0.95)
            if near:
                raise ForerunError(f"{self.place}: unknown key {key!r}; did you mean {near[0]}?")

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises ForerunError for a key that nothing has read and that is not in `ignored`."""
        known = self._known | set(ignored)
        for key in self._values:
            if key not in known:
                near = difflib.get_close_matches(str(key), sorted(known), 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(self._known))}"
                raise ForerunError(f"{self.place}: unknown key {str(key)!r}{hint}")

    def _missing(self, key: str, wanted: str) -> ForerunError:
        near = difflib.get_close_matches(key, [str(k) for k in self._values if k not in self._known], 1, 0.8)
        found = f"; found {near[0]!r} instead" if near else ""
        return ForerunError(f"{self.place}: missing key {key!r} ({wanted}){found}")

    def _wrong(self, key: str, wanted: str) -> ForerunError:
        value = self._values[key]
        return self.error(key, f"must be {wanted}, got {_shown(value)} ({type(value).__name__})")


def read_json(path: Path) -> Fields:
    """Returns the object in a JSON file. Raises ForerunError if it is unreadable, cut short, or no object."""
    return _object(parse_json(read_text(path), str(path), any_number=True), path, "a JSON object")


def read_yaml(path: Path) -> Fields:
    """Returns the mapping in a YAML file. Raises ForerunError if it is unreadable, not valid, or no mapping."""
    return _object(read_any_yaml(path), path, "a YAML mapping")


def _object(value: object, path: Path, wanted: str) -> Fields:
    if not isinstance(value, Mapping):
        raise ForerunError(f"{path}: must be {wanted}, got {type(value).__name__}")
    return Fields(value, str(path))


def _same(left: object, right: object) -> bool:
    """Returns whether two values are equal, where true is not 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
