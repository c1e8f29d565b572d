"""StackName: patterns of the words by which tables of measurements name a framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

import pydantic


@dataclass(frozen=True)
class StackName:
    """Patterns of the words that name a framework and its version: regular expressions that ignore case.

    Every pattern has to occur in the column of its name; an empty pattern matches every text.
    """

    framework: str
    software: str = ""
    """pattern of versions and dates"""
    notes: str = ""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for column in fields(self):
            try:
                re.compile(getattr(self, column.name))
            except re.error as error:
                raise ValueError(f"{column.name} is no regular expression: {error}") from None

    def letters_in(self, columns: Mapping[str, str]) -> tuple[int, ...]:
        """Returns the number of letters that the patterns cover in each column; () where one does not occur."""
        found = [
            re.search(getattr(self, column.name), columns.get(column.name, ""), re.IGNORECASE)
            for column in fields(self)
        ]
        return () if None in found else tuple(len(one[0]) for one in found if one is not None)
