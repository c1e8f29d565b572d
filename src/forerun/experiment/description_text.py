"""The text of an experiment file as a mapping, and keys that nobody knows."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forerun.cluster.files import read_yaml
from forerun.errors import ForerunError

_MANY = 25
"""known keys that an error lists, at most"""


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file. Raises ForerunError, which names the file and where possible the line."""
    if path.suffix.lower() != ".json":
        return read_yaml(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ForerunError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        raise ForerunError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ForerunError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ForerunError(f"{path}: not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ForerunError(f"{path}: expected keys and values, got {type(data).__name__}")
    return data


def refuse_unknown(
    given: Iterable[str], known: Iterable[str], by_section: Mapping[str, Iterable[str]], place: str
) -> None:
    """Raise ForerunError for a key of `given` that is not `known`: where it belongs, or the nearest known one."""
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
        raise ForerunError(f"{place}: unknown key {key!r:.60}; {hint}")


def _near(key: str, keys: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(str(key).lower(), [*keys], 1, 0.8)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r:.60} is given twice")
        found[key] = value
    return found
