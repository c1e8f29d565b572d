"""Communication patterns by name, with their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.common.errors import ForerunError, UnknownName
from forerun.core.network.alpha_beta import AlphaBeta
from forerun.core.network.patterns import CommunicationPattern, NoNetwork, TimedBy
from forerun.core.network.patterns_collectives import (
    AllGather,
    Compressed,
    Nccl,
    ReduceScatter,
    RingAllReduce,
    TreeAllReduce,
)
from forerun.core.network.patterns_messages import ParameterServer

PATTERNS: dict[str, type[CommunicationPattern]] = {
    "nccl": Nccl,
    "ring_allreduce": RingAllReduce,
    "tree_allreduce": TreeAllReduce,
    "reduce_scatter": ReduceScatter,
    "all_gather": AllGather,
    "parameter_server": ParameterServer,
    "no_network": NoNetwork,
}
OPTIONS = {
    "efficiency": "share of the links' rate that is reached, with textbook latencies; unless given as NCCL does",
    "hop_latency_us": "of a step, with efficiency; unless given that of the links",
    "base_latency_us": "of the whole pattern, with efficiency",
    "servers": "of parameter_server: ranks that share the gradients",
    "compression": "bytes of gradients over those on the wire",
    "compression_passes": "reads of the gradients that compressing takes, 1 unless given",
}
_RATES = ("efficiency", "hop_latency_us", "base_latency_us")
_COMPRESSION = ("compression", "compression_passes")
Own = CommunicationPattern | type[CommunicationPattern] | Callable[[float, int], float]


def pattern_of(
    given: str | Mapping[str, Any] | Own | None, place: str = "communication_pattern"
) -> CommunicationPattern | None:
    """Returns the pattern that `given` means; None for NCCL's own choice.

    `given` is a name of `PATTERNS`, the user's own object (a pattern, a subclass that needs no arguments, or a function
    of bytes and ranks that returns seconds), or one of these as `{name: ..., **OPTIONS}`. `place` names the key in
    errors.

    Raises:
        ForerunError: an unknown name or option, or a value that makes no sense.
    """
    if given is None:
        return None
    options: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"name": given}
    if "name" not in options:
        raise ForerunError(f"{place}: key name is missing; it is one of: {', '.join(PATTERNS)}")
    name = options.pop("name")
    for key, value in options.items():
        if key not in OPTIONS:
            raise UnknownName(f"key of {place}", key, ["name", *OPTIONS])
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ForerunError(f"{place}: {key} is {value!r}, it has to be a number, 0 or more")
    compression = {key: float(options.pop(key)) for key in _COMPRESSION if key in options}
    pattern = _shipped(name, options, place) if isinstance(name, str) else _own(name, options, place)
    if compression.get("compression", 1) == 1:
        return None if pattern == Nccl() else pattern
    return Compressed(pattern, compression["compression"], compression.get("compression_passes", 1.0))


def _shipped(name: str, options: dict[str, Any], place: str) -> CommunicationPattern:
    made = PATTERNS.get(name.strip().lower().replace("-", "_").replace(" ", "_"))
    if made is None:
        raise UnknownName(place, name, list(PATTERNS))
    values: dict[str, Any] = {}
    rates = {key: float(options.pop(key)) for key in _RATES if key in options and made is not NoNetwork}
    if rates:
        if "efficiency" not in rates:
            raise ForerunError(f"{place}: latencies go with efficiency, the share of the links' rate that is reached")
        if not 0 < rates["efficiency"] <= 1:
            raise ForerunError(f"{place}: efficiency is {rates['efficiency']:g}, it has to be above 0 and at most 1")
        values["rates"] = AlphaBeta(**rates)
    if made is ParameterServer and "servers" in options:
        values["servers"] = options.pop("servers")
    _none_left(options, name, place)
    return made(**values)


def _own(given: object, options: dict[str, Any], place: str) -> CommunicationPattern:
    """Returns the pattern that a user gave as an object, a class or a function."""
    _none_left(options, "one's own pattern", place)
    if isinstance(given, CommunicationPattern):
        return given
    if isinstance(given, type) and issubclass(given, CommunicationPattern):
        try:
            return given()
        except TypeError as error:
            raise ForerunError(f"{place}: {given.__name__} can't be made without arguments ({error})") from None
    if callable(given) and not isinstance(given, type):
        return TimedBy(given, getattr(given, "__name__", "own"))
    raise ForerunError(
        f"{place}: {given!r} is not a pattern; give a name ({', '.join(PATTERNS)}), a CommunicationPattern, or a"
        " function of bytes and ranks that returns seconds"
    )


def _none_left(options: dict[str, Any], name: str, place: str) -> None:
    if options:
        raise ForerunError(f"{place}: {next(iter(options))} is not an option of {name}")
