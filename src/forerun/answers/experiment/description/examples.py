"""The examples that come with Forerun: experiment files, and the kind of study of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.common.yaml_files import read_yaml

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Example:
    """One example."""

    number: int
    title: str
    path: Path
    """its experiment file"""
    nodes: tuple[int, ...] = ()
    """nodes of a scaling study; empty for another kind of example"""
    patterns: tuple[str, ...] = ()
    """communication patterns of a comparison; empty for another kind of example"""


@cache
def examples() -> dict[int, Example]:
    """Returns every example by its number."""
    return {
        int(number): Example(
            int(number),
            entry["title"],
            _HERE / "examples" / entry["file"],
            tuple(entry.get("nodes", ())),
            tuple(entry.get("patterns", ())),
        )
        for number, entry in read_yaml(_HERE / "examples.yaml").items()
    }
