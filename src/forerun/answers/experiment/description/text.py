"""The text of an experiment file as a mapping, and errors for unknown keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forerun.common.admission import read_json
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import read_yaml

_MANY = 25
"""known keys that an error lists, at most"""
_LONGEST_TEXT = 4096
_LARGEST = 10**18
_DEEPEST = 20
_PAGE = "docs/experiments.md"


def read_mapping(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML or JSON file. Raises ForerunError, which names the file and where possible the
    line."""
    if path.suffix.lower() != ".json":
        return read_yaml(path)
    data = read_json(path)
    if not isinstance(data, dict):
        raise ForerunError(f"{path}: expected keys and values, got {type(data).__name__}")
    return data


def refuse_unknown(
    given: Iterable[str], known: Iterable[str], by_section: Mapping[str, Iterable[str]], place: str
) -> None:
    """Raises ForerunError for a key of `given` that is not `known`: where it belongs, or the nearest known one,
    and the page that explains all."""
    known = [*known]
    for key in given:
        if key in known:
            continue
        home = [section for section, keys in by_section.items() if key in keys]
        close = difflib.get_close_matches(str(key).lower(), known, 1)
        if home:
            hint = f"it belongs in section {' or '.join(home)}"
        elif close:
            hint = f"did you mean {close[0]}?"
        else:
            near = [f"{section}.{each}" for section, keys in by_section.items() for each in _near(key, keys)]
            shown = ", ".join(known[:_MANY]) + (", ..." if len(known) > _MANY else "")
            hint = f"did you mean {near[0]}?" if near else f"known: {shown}"
        raise ForerunError(f"{place}: unknown key {key!r:.60}; {hint}; {_PAGE} explains the keys")


def _near(key: str, keys: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(str(key).lower(), [*keys], 1, 0.8)


def refuse_wild(value: Any, place: str, seen: set[int] | None = None, depth: int = 0) -> None:
    """Raises ForerunError for values that no key can have, so that later code need not check them: numbers that are not
    finite or beyond all bounds, text of several lines, endless nesting. A description may have lines.
    """
    seen = set() if seen is None else seen
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
        shown = f"{value:g}" if isinstance(value, float) else f"one of {value.bit_length()} bits"
        raise ForerunError(f"{place}: expected a number between {-_LARGEST:.0e} and {_LARGEST:.0e}, got {shown}")
    if isinstance(value, str):
        _refuse_wild_text(value, place)
    if not isinstance(value, (Mapping, list, tuple)) or id(value) in seen:
        return
    if depth == _DEEPEST:
        raise ForerunError(f"{place}: is nested more than {_DEEPEST} deep")
    seen.add(id(value))
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, each in parts:
        refuse_wild(key, f"{place}: a key of it", seen, depth + 1)
        if not (depth == 0 and key == "description" and isinstance(each, str)):
            refuse_wild(each, f"{place}{': ' if depth == 0 else '.'}{key}", seen, depth + 1)


def _refuse_wild_text(text: str, place: str) -> None:
    if len(text) > _LONGEST_TEXT:
        raise ForerunError(f"{place}: is text of {len(text):,} characters; at most {_LONGEST_TEXT:,} are read")
    if not text.isprintable():
        raise ForerunError(f"{place}: expected text in one line and without control characters, got {text!r:.60}")
