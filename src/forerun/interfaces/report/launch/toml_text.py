"""TOML of tables of plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_text(tables: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    """One table for each name (dotted names are tables inside tables), after lines of comment."""
    parts = ["\n".join(f"# {line}".rstrip() for line in comment.splitlines())]
    for name, values in tables.items():
        if values:
            parts.append("\n".join([f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items())]))
    return "\n\n".join(parts) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        items = [_value(item) for item in value]
        nested = any(isinstance(item, list) for item in value)
        return "[\n" + "".join(f"    {item},\n" for item in items) + "]" if nested else f"[{', '.join(items)}]"
    return repr(value)
