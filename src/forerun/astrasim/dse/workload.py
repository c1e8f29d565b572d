"""Workloads, which are the sizes of a transformer by STAGE's flags, and strategies, which split them over ranks."""

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
"""axes that have another symbol in STAGE's second generation"""
_FIRST_GENERATION = {field.name: field.type for field in fields(StageArgs) if field.name not in _STRATEGY}
_SECOND_GENERATION = {field.name: field.type for field in fields(SecondStageArgs) if field.name not in _STRATEGY}
_SIZES = _FIRST_GENERATION | _SECOND_GENERATION
_NEEDED_IN_SECOND = ("dvocal", "dmodel", "dff", "head", "seq", "batch", "num_stacks")


@dataclass(frozen=True, slots=True)
class Strategy:
    """Describes how a workload is split over the ranks of a system."""

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
    is_first_generation: bool

    def args(self, strategy: Strategy) -> Args:
        """Returns the flags of a point.

        Raises ForerunError if STAGE's generation can't make the workload with this strategy.
        """
        split: dict[str, Any] = {name: getattr(strategy, name) for name in _STRATEGY}
        if not self.is_first_generation:
            return SecondStageArgs(**self.sizes, **split)  # type: ignore[arg-type]
        if split.pop("ep") > 1:
            raise ForerunError("experts (ep) are for workloads of STAGE's second generation, those with dvocal")
        return StageArgs(**self.sizes, **split)  # type: ignore[arg-type]

    def axes(self, strategy: Strategy) -> tuple[str, ...]:
        """Returns the axes with several ranks, in the order in which the traces of a point number their groups."""
        degrees = self.args(strategy).degrees
        return tuple(_AXIS_OF_SYMBOL.get(symbol, symbol) for symbol, degree in degrees.items() if degree > 1)


def workload_from(name: str, data: Any, place: str) -> Workload:
    """Makes a workload of a mapping of sizes; `din` and `dout` mean STAGE's first generation, `dvocal` its second.

    Raises ForerunError if a key is unknown or missing, keys are of both generations, or a value is wrong.
    """
    if not isinstance(data, dict):
        raise ForerunError(f"{place}: expected sizes such as dmodel: 8192, got {str(data)[:60]!r}")
    given = {str(key): value for key, value in data.items()}
    for key in given:
        if key in _STRATEGY:
            raise ForerunError(f"{place}.{key}: belongs under plan, where its values are listed")
        if key not in _SIZES:
            raise UnknownName(f"key in {place}", key, list(_SIZES))
    in_first = sorted(given.keys() & (_FIRST_GENERATION.keys() - _SECOND_GENERATION.keys()))
    in_second = sorted(given.keys() & (_SECOND_GENERATION.keys() - _FIRST_GENERATION.keys()))
    if in_first and in_second:
        raise ForerunError(
            f"{place}: {in_first[0]} is of STAGE's first generation, {in_second[0]} of its second; give those of one"
        )
    if not in_first and "dvocal" not in given:
        raise ForerunError(f"{place}: give din and dout (STAGE's first generation) or dvocal (its second)")
    kinds = _FIRST_GENERATION if in_first else _SECOND_GENERATION
    needed = tuple(_FIRST_GENERATION) if in_first else _NEEDED_IN_SECOND
    missing = [key for key in needed if key not in given]
    if missing:
        raise ForerunError(f"{place}: key {missing[0]!r} is missing; a workload has {', '.join(needed)}")
    sizes = {key: _value(value, str(kinds[key]), f"{place}.{key}") for key, value in given.items()}
    workload = Workload(name, sizes, bool(in_first))
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
    """Returns the traces of all ranks, each made on use."""
    return generate(args) if isinstance(args, StageArgs) else generate_second(args)
