"""Dispatchers by name, from `dispatchers.yaml`. A dispatcher brings tokens to their experts and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import pydantic
import yaml

from forerun.common.errors import ForerunError, UnknownName


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
    text = (resources.files("forerun.describe.kernels") / "dispatchers.yaml").read_text(encoding="utf-8")
    entries = {name: {"name": name, **entry} for name, entry in yaml.safe_load(text).items()}
    try:
        return pydantic.TypeAdapter(dict[str, Dispatcher]).validate_python(entries)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ForerunError(f"dispatchers.yaml: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def dispatcher(name: str) -> Dispatcher:
    """Returns the dispatcher `name`. Raises UnknownName, which lists the known dispatchers."""
    if name not in dispatchers():
        raise UnknownName("dispatcher", name, [*dispatchers()])
    return dispatchers()[name]
