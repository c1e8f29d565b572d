"""Numbers that ASTRA-sim's source code fixes, from `reference.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from forerun.describe.cluster.files import read_yaml


def reference(name: str) -> Any:
    """Returns the number, or numbers by name, under this key of `reference.yaml`."""
    return _file()[name]


@cache
def _file() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("reference.yaml"))
