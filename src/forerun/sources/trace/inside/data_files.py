"""Reads the data files of the traced process: facts about torch, CUDA and torchtitan, each with its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from forerun.common.yaml_files import parse_yaml


def read_text(name: str) -> str:
    """Returns the text of a file, named relative to this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@cache
def read_data(name: str) -> dict[str, Any]:
    """Returns the content of a YAML file, named relative to this folder. Callers share it and don't change it."""
    return parse_yaml(read_text(name), name)
