"""Python expressions as text that people read: calls, lists and plain values, broken where a line gets long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_WIDTH, _STEP = 100, 4


@dataclass(frozen=True)
class Code:
    """An expression that stands as it is, where other text is quoted."""

    text: str


@dataclass(frozen=True)
class Call:
    """`name(key=value, ...)`."""

    name: str
    arguments: Mapping[str, Any]


def python_text(value: Any, indent: int = 0) -> str:
    """Returns `value` as an expression whose first line starts at column `indent`."""
    line = _on_one_line(value)
    if indent + len(line) <= _WIDTH:
        return line
    inside = indent + _STEP
    if isinstance(value, Call):
        parts = (f"{key}={python_text(one, inside)}" for key, one in value.arguments.items())
        return _broken(f"{value.name}(", parts, ")", indent)
    if isinstance(value, list):
        return _broken("[", (python_text(one, inside) for one in value), "]", indent)
    if isinstance(value, dict):
        parts = (f"{python_text(key)}: {python_text(one, inside)}" for key, one in value.items())
        return _broken("{", parts, "}", indent)
    return line


def _on_one_line(value: Any) -> str:
    if isinstance(value, Code):
        return value.text
    if isinstance(value, Call):
        return f"{value.name}({', '.join(f'{key}={_on_one_line(one)}' for key, one in value.arguments.items())})"
    if isinstance(value, list):
        return f"[{', '.join(map(_on_one_line, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_on_one_line(key)}: {_on_one_line(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def _broken(start: str, parts: Iterable[str], end: str, indent: int) -> str:
    inner = "".join(f"\n{' ' * (indent + _STEP)}{part}," for part in parts)
    return f"{start}{inner}\n{' ' * indent}{end}"
