"""Communication patterns by name, with their options, or one's own from a Python file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, UnknownName
from forerun.network.alpha_beta import AlphaBeta
from forerun.network.patterns import CommunicationPattern, NoNetwork, TimedBy
from forerun.network.patterns_collectives import (
    AllGather,
    Compressed,
    Nccl,
    ReduceScatter,
    RingAllReduce,
    TreeAllReduce,
)
from forerun.network.patterns_messages import ParameterServer

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
_WITHOUT_RATES = (NoNetwork,)
PatternLike = str | Mapping[str, Any] | CommunicationPattern | Callable[[float, int], float] | None


def pattern_of(
    given: PatternLike, place: str = "communication_pattern", folder: Path | None = None
) -> CommunicationPattern | None:
    """The pattern that `given` means; None for NCCL's own choice.

    A name of `PATTERNS`, or `{name: ..., **OPTIONS}`; `my_patterns.py:Butterfly`, a pattern, a subclass that needs no
    arguments or a function `(bytes, ranks) -> seconds` in a Python file (relative to `folder`), which is run; or such
    an object itself. `place` names the key in errors.

    Raises:
        ForerunError: an unknown name or option, a value that makes no sense, a file that can't be run.
    """
    if given is None or isinstance(given, CommunicationPattern):
        return given
    if isinstance(given, str):
        return _named(given, {}, place, folder)
    if isinstance(given, Mapping):
        options = dict(given)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ForerunError(f"{place}: key name is missing; it is one of: {', '.join(PATTERNS)}")
        return _named(name, options, f"{place}.{name}", folder)
    return _own(given, place)


def _named(name: str, options: dict[str, Any], place: str, folder: Path | None) -> CommunicationPattern | None:
    for key, value in options.items():
        if key not in OPTIONS:
            raise UnknownName(f"key of {place}:", key, list(OPTIONS))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ForerunError(f"{place}: {key} is {value!r}, it has to be a number, 0 or more")
    path, found_colon, attribute = name.rpartition(":")
    if found_colon and path.endswith(".py"):
        pattern = _own(_from_file(Path(path), attribute, place, folder), place)
        refused = [key for key in options if not key.startswith("compression")]
    else:
        made = PATTERNS.get(_plain(name))
        if made is None:
            own = "; one's own is my_patterns.py:Name"
            raise ForerunError(str(UnknownName(place.split(".")[0], name, list(PATTERNS))) + own)
        pattern, refused = _made(made, options, place)
    if refused:
        raise ForerunError(f"{place}: {refused[0]} is no option of {name}")
    if options.get("compression", 1) != 1:
        return Compressed(pattern, float(options["compression"]), float(options.get("compression_passes", 1.0)))
    if "compression_passes" in options and "compression" not in options:
        raise ForerunError(f"{place}: compression_passes goes with compression")
    return None if pattern == Nccl() else pattern


def _made(
    made: type[CommunicationPattern], options: dict[str, Any], place: str
) -> tuple[CommunicationPattern, list[str]]:
    """A shipped pattern, and the options that it doesn't have."""
    values: dict[str, Any] = {}
    refused = [key for key in _RATES if key in options and issubclass(made, _WITHOUT_RATES)]
    if not refused and any(key in options for key in _RATES):
        if "efficiency" not in options:
            raise ForerunError(f"{place}: latencies go with efficiency, the share of the links' rate that is reached")
        if not 0 < options["efficiency"] <= 1:
            raise ForerunError(f"{place}: efficiency is {options['efficiency']!r}, it has to be above 0 and at most 1")
        values["rates"] = AlphaBeta(**{key: float(options[key]) for key in _RATES if key in options})
    if "servers" in options and issubclass(made, ParameterServer):
        values["servers"] = options["servers"]
    elif "servers" in options:
        refused.append("servers")
    return made(**values), refused


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def _own(given: Any, place: str) -> CommunicationPattern:
    """A pattern of a pattern, a class of them, or a function."""
    if isinstance(given, type) and issubclass(given, CommunicationPattern):
        try:
            return given()
        except TypeError as error:
            raise ForerunError(f"{place}: {given.__name__} can't be made ({error}); give it no arguments") from None
    if isinstance(given, CommunicationPattern):
        return given
    if callable(given):
        return TimedBy(given, getattr(given, "__name__", "own"))
    raise ForerunError(
        f"{place}: {given!r} is no pattern; give a name ({', '.join(PATTERNS)}), a CommunicationPattern, or a function"
        " of bytes and ranks that returns seconds"
    )


def _from_file(path: Path, attribute: str, place: str, folder: Path | None) -> Any:
    """What a Python file calls `attribute`."""
    where = path if folder is None else folder / path
    if not where.is_file():
        raise ForerunError(f"{place}: {where}: no such file")
    spec = importlib.util.spec_from_file_location(where.stem, where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(where.stem, module)  # dataclasses look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ForerunError(f"{place}: {where}: {type(error).__name__}: {error}") from None
    if not hasattr(module, attribute):
        raise ForerunError(f"{place}: {where} has no {attribute!r}")
    return getattr(module, attribute)
