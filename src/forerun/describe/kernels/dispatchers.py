"""Dispatchers by name, from `dispatchers.yaml`. A dispatcher brings tokens to their experts and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import pydantic

from forerun.common.errors import UnknownName
from forerun.describe.kernels.attention import named_entries


@dataclass(frozen=True)
class Dispatcher:
    """One entry of `dispatchers.yaml`, which explains the keys."""

    name: str
    says: str
    source: str
    exchange: Literal["all_to_all", "gather"]
    counts: bool = False
    sorts: bool = False
    rounds_to: int = 1

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")


@cache
def dispatchers() -> dict[str, Dispatcher]:
    """Returns the dispatchers by name. Raises ForerunError, which names the entry and its wrong key."""
    return named_entries(Dispatcher, "dispatchers.yaml")


def dispatcher(name: str) -> Dispatcher:
    """Returns the dispatcher `name`. Raises UnknownName, which lists the known dispatchers."""
    if name not in dispatchers():
        raise UnknownName("dispatcher", name, [*dispatchers()])
    return dispatchers()[name]
