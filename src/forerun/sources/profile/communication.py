"""Finds the kernels that communicate between GPUs, by their names (`communication.yaml`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from forerun.common.shipped import shipped_data, validated

_FILE = "communication.yaml"


@dataclass(frozen=True)
class _Library:
    names: str
    what: str
    source: str


def communicates(name: str) -> bool:
    """Returns whether a kernel of this name communicates, whatever the library."""
    return bool(_pattern().search(name))


@cache
def _pattern() -> re.Pattern[str]:
    libraries: list[_Library] = validated(list[_Library], shipped_data(__package__, _FILE), _FILE)
    return re.compile("|".join(f"(?:{one.names})" for one in libraries), re.IGNORECASE)
