"""Workloads: the size of a transformer, as STAGE's flags name it; strategies make it the flags of a point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from forerun.astrasim.stage.first_generation import StageArgs, StageTraces, generate
from forerun.astrasim.stage.second_generation import SecondStageArgs, SecondStageTraces, generate_second
from forerun.common.errors import ForerunError, UnknownName

Args: TypeAlias = "StageArgs | SecondStageArgs"

_STRATEGY = ("dp", "tp", "sp", "pp", "ep", "weight_sharded", "activation_recompute")
_AXIS_OF_SYMBOL = {"cp": "sp"}
"""where STAGE's second generation calls an axis otherwise"""
_FIRST = {field.name: field.type for field in fields(StageArgs) if field.name not in _STRATEGY}
_SECOND = {field.name: field.type for field in fields(SecondStageArgs) if field.name not in _STRATEGY}
_OF_FIRST = set(_FIRST) - set(_SECOND)
_OF_SECOND = set(_SECOND) - set(_FIRST)
_NEEDED_FIRST = tuple(_FIRST)
_NEEDED_SECOND = ("dvocal", "dmodel", "dff", "head", "seq", "batch", "num_stacks")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a workload is split over the ranks of a system."""

    dp: int = 1
    tp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1
    weight_sharded: bool = False
    activation_recompute: bool = False

    @property
    def n_ranks(self) -> int:
        return self.dp * self.tp * self.sp * self.pp * self.ep


@dataclass(frozen=True)
class Workload:
    """A transformer of one of STAGE's generations."""

    name: str
    sizes: Mapping[str, int | bool | str]
    is_first: bool

    def args(self, strategy: Strategy) -> Args:
        """The flags of a point.

        Raises:
            ForerunError: the generation can't make the workload with this strategy.
        """
        split: dict[str, Any] = {name: getattr(strategy, name) for name in _STRATEGY}
        if not self.is_first:
            return SecondStageArgs(**self.sizes, **split)  # type: ignore[arg-type]
        if split.pop("ep") > 1:
            raise ForerunError("experts (ep) are for workloads of STAGE's second generation, those with dvocal")
        return StageArgs(**self.sizes, **split)  # type: ignore[arg-type]

    def axes(self, strategy: Strategy) -> tuple[str, ...]:
        """The axes of more than one rank whose groups the traces of a point have, in the order of their numbers."""
        degrees = self.args(strategy).degrees
        return tuple(_AXIS_OF_SYMBOL.get(symbol, symbol) for symbol, degree in degrees.items() if degree > 1)


def workload_from(name: str, data: Any, place: str) -> Workload:
    """The workload in a mapping of sizes; `din` and `dout` tell the first generation, `dvocal` the second.

    Raises:
        ForerunError: a key is unknown, missing or of both generations, a value is of the wrong type or range.
    """
    if not isinstance(data, dict):
        raise ForerunError(f"{place}: expected sizes such as dmodel: 8192, got {str(data)[:60]!r}")
    given = {str(key): value for key, value in data.items()}
    for key in given:
        if key in _STRATEGY:
            raise ForerunError(f"{place}.{key}: belongs under plan, where its values are listed")
        if key not in {**_FIRST, **_SECOND}:
            raise UnknownName(f"key in {place}", key, [*{**_FIRST, **_SECOND}])
    first, second = sorted(_OF_FIRST & given.keys()), sorted(_OF_SECOND & given.keys())
    if first and second:
        raise ForerunError(
            f"{place}: {first[0]} is of STAGE's first generation, {second[0]} of its second; give those of one"
        )
    if not first and "dvocal" not in given:
        raise ForerunError(f"{place}: give din and dout (STAGE's first generation) or dvocal (its second)")
    kinds, needed = (_FIRST, _NEEDED_FIRST) if first else (_SECOND, _NEEDED_SECOND)
    missing = [key for key in needed if key not in given]
    if missing:
        raise ForerunError(f"{place}: key {missing[0]!r} is missing; a workload has {', '.join(needed)}")
    sizes = {key: _value(value, str(kinds[key]), f"{place}.{key}") for key, value in given.items()}
    workload = Workload(name, sizes, bool(first))
    try:
        workload.args(Strategy())
    except ForerunError as error:
        raise ForerunError(f"{place}: {str(error).removeprefix('--')}") from None
    return workload


def _value(value: Any, kind: str, place: str) -> int | bool | str:
    wanted = {"bool": "true or false", "str": "text", "int": "a whole number"}[kind]
    if type(value).__name__ != kind:
        raise ForerunError(f"{place}: expected {wanted}, got {str(value)[:60]!r}")
    answer: int | bool | str = value
    return answer


def traces_of(args: Args) -> StageTraces | SecondStageTraces:
    """The traces of all ranks, made when asked for."""
    return generate(args) if isinstance(args, StageArgs) else generate_second(args)
