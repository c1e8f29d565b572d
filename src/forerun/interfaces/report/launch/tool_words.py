"""The words and constants of each tool, from tools.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from forerun.common.shipped import shipped_data


@dataclass(frozen=True)
class ToolWords:
    """What a tool calls the values of a plan, and what it does without a setting."""

    title: str
    words: Mapping[str, Mapping[Any, Any]]
    """field of a plan -> its value -> the tool's word"""
    constants: Mapping[str, Any]


@cache
def words_of(tool: str) -> ToolWords:
    """The words of the tool that `--launch` calls `tool`; none for an unknown one."""
    for table in shipped_data(__package__, "tools.yaml").values():
        if tool in table["tools"]:
            return ToolWords(table["title"], table["words"], table["constants"])
    return ToolWords(tool, {}, {})
