"""Writes records as JSON, and rows as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.common.files import whole_file

SCHEMA_VERSION = 1
"""the version of all JSON outputs: within one, outputs only gain keys (docs/schemas, docs/deprecation.md)"""


def to_json(record: dict[str, Any]) -> str:
    """Returns one JSON object, indented, with the version of its schema first.

    Figures that are not numbers would be a fault, so they raise ValueError.
    """
    return json.dumps({"schema_version": SCHEMA_VERSION, **record}, indent=2, allow_nan=False)


def finite(value: Any) -> Any:
    """Returns the contents of a record with null in place of each missing figure (nan)."""
    if isinstance(value, dict):
        return {key: finite(inside) for key, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inside) for inside in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with the same keys as CSV. The file appears whole or not at all; ForerunError if it can't be
    written."""
    with whole_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["rank"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)


def write_table(path: str | Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Writes rows of cells as CSV; a figure that does not exist is empty. The file appears whole or not at all.

    Raises ForerunError if the file can't be written.
    """
    with whole_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([["" if cell != cell else cell for cell in row] for row in rows])


def cell(value: object) -> object:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return {None: "", True: "yes", False: "no"}.get(value, value) if isinstance(value, (bool, type(None))) else value
