"""Dispatchers by name, from `dispatchers.yaml`. A dispatcher brings tokens to their experts and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import pydantic

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.kernels.attention import named_entries

AUTO = "auto"
"""the dispatcher of a plan that leaves it to its stack"""


@dataclass(frozen=True)
class Transport:
    """The kernels of a dispatcher that does not use NCCL; `dispatchers.yaml` explains the keys."""

    sms: int
    notify_us: float
    near_share: float
    far_share: float
    sm_gb_s: tuple[float, float]
    sm_gb_s_across: tuple[float, float]
    beside_compute: float

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Dispatcher:
    """One entry of `dispatchers.yaml`, which explains the keys."""

    name: str
    says: str
    source: str
    exchange: Literal["all_to_all", "gather"]
    copies: Literal["expert", "node"] = "expert"
    fp8_dispatch: bool = False
    counts: bool = False
    reads_counts: bool = False
    sorts: bool = False
    orders_tokens: bool = False
    rounds_to: int = 1
    transport: Transport | None = None

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        if (self.copies == "node") != (self.transport is not None):
            raise ValueError("copies: node needs a transport, and NCCL sends copies for each expert")


@cache
def dispatchers() -> dict[str, Dispatcher]:
    """Returns the dispatchers by name. Raises ForerunError, which names the entry and its wrong key."""
    return named_entries(Dispatcher, "dispatchers.yaml")


def dispatcher(name: str) -> Dispatcher:
    """Returns the dispatcher `name`. Raises UnknownName, which lists the known dispatchers."""
    if name not in dispatchers():
        raise UnknownName("dispatcher", name, [*dispatchers()])
    return dispatchers()[name]


def transport_of(name: str) -> Transport:
    """Returns the kernels of dispatcher `name`. Raises ForerunError for one that uses NCCL's."""
    transport = dispatcher(name).transport
    if transport is None:
        raise ForerunError(f"dispatcher {name} has no kernels of its own; it sends tokens by NCCL")
    return transport
