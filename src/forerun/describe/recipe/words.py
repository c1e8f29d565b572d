"""The names of each tool for the fields of a plan and a model. Launch files and recipes use this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from forerun.common.shipped import shipped_data
from forerun.describe.kernels.optimizers import optimizer_names


@dataclass(frozen=True)
class ToolWords:
    """Holds a tool's words for the values of a plan, and its own defaults."""

    title: str
    words: Mapping[str, Mapping[Any, Any]]
    """field of a plan -> its value -> the tool's word"""
    constants: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    """field of a plan -> the setting that holds its value, or the tool's word for it"""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """field of a model, such as hidden or moe.top_k -> the setting that holds it"""

    def value_of(self, name: str, word: Any) -> Any:
        """Returns the value of plan field `name` for which the tool has `word`; None if it has no such word."""
        return next((value for value, own in self.words[name].items() if own == word), None)


@cache
def words_of(tool: str) -> ToolWords:
    """Returns the words of the tool that `--launch` calls `tool`; none for an unknown one."""
    for key, table in shipped_data(__package__, "tools.yaml").items():
        if tool in table["tools"]:
            words = {**table["words"], "optimizer": optimizer_names(key)}
            return ToolWords(table["title"], words, table["constants"], table.get("keys", {}), table.get("sizes", {}))
    return ToolWords(tool, {}, {})
