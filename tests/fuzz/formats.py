"""What a format of files is to the fuzzer: a sound file of it, and the commands that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Format:
    """A format of files, and the commands that read it."""

    name: str
    """of the file"""
    seed: Any
    """what a sound file holds: data for YAML, JSON, pickle and Parquet, rows for CSV, else the file itself"""
    commands: tuple[str, ...]
