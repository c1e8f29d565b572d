"""Reads points that are listed one by one, as keys `dp_tp_sp_pp_ar` or as mappings of axes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.astrasim.dse.space import AXES, Point
from forerun.astrasim.dse.workload import Strategy
from forerun.common.errors import ForerunError, UnknownName

_KEY = re.compile(r"(\d+)_(\d+)_(\d+)_(\d+)_([01])(?:_ep(\d+))?(_sharded)?")


def key_of(strategy: Strategy) -> str:
    """Returns `dp_tp_sp_pp_ar`, where ar is 1 with recomputation, and `_ep2` and `_sharded` if they apply."""
    degrees = (strategy.dp, strategy.tp, strategy.sp, strategy.pp, int(strategy.activation_recompute))
    experts, sharded = f"_ep{strategy.ep}" * (strategy.ep > 1), "_sharded" * strategy.weight_sharded
    return "_".join(map(str, degrees)) + experts + sharded


def listed_points(given: Any, pairs: Sequence[tuple[str, str]], npus: Mapping[str, int], place: str) -> list[Point]:
    """Returns the points of every pair, in the order of the list.

    `given` is a list for all workloads, or a mapping of their names to lists. A list may also be text with spaces
    between the keys, or the results of an exploration, whose keys count.

    Raises ForerunError if a point is wrong or doesn't fill its system, or a workload is unknown or has no point.
    """
    by_workload = isinstance(given, dict) and not _are_keys(given)
    if by_workload:
        known = list(dict.fromkeys(workload for workload, _ in pairs))
        for name in given:
            if name not in known:
                raise UnknownName(f"workload in {place}:", str(name), known)
    points: dict[Point, None] = {}
    for workload, system in pairs:
        strategies = _strategies(given.get(workload) if by_workload else given, place)
        if not strategies:
            raise ForerunError(f"{place}: there is no point of workload {workload!r}; list some, as 8_1_8_1_1")
        for strategy in strategies:
            if strategy.n_ranks != npus[system]:
                raise ForerunError(
                    f"{place}: {key_of(strategy)} has {strategy.n_ranks} ranks, but system {system!r} has "
                    f"{npus[system]} NPUs"
                )
            points[Point(workload, system, strategy)] = None
    return list(points)


def _are_keys(given: Mapping[Any, Any]) -> bool:
    return bool(given) and all(_KEY.fullmatch(str(key)) for key in given)


def _strategies(given: Any, place: str) -> list[Strategy]:
    if isinstance(given, str):
        given = given.split()
    if isinstance(given, dict):
        given = list(given)
    if given is not None and not isinstance(given, list):
        raise ForerunError(f"{place}: expected a list of points, as [8_1_8_1_1], got {str(given)[:60]!r}")
    return [_strategy(one, place) for one in given or []]


def _strategy(given: Any, place: str) -> Strategy:
    if isinstance(given, dict):
        return _from_mapping(given, place)
    match = _KEY.fullmatch(str(given))
    if not match:
        raise ForerunError(
            f"{place}: a point is dp_tp_sp_pp_ar, as 8_1_8_1_1 (ar 1 recomputes activations), or a mapping of axes; "
            f"got {str(given)[:60]!r}"
        )
    dp, tp, sp, pp = (int(degree) for degree in match.groups()[:4])
    strategy = Strategy(dp, tp, sp, pp, int(match[6] or 1), bool(match[7]), match[5] == "1")
    if strategy.n_ranks < 1:
        raise ForerunError(f"{place}: {given}: degrees are whole numbers of at least 1")
    return strategy


def _from_mapping(given: Mapping[Any, Any], place: str) -> Strategy:
    for axis, value in given.items():
        if axis not in AXES:
            raise UnknownName(f"axis in {place}:", str(axis), list(AXES))
        is_flag = isinstance(getattr(Strategy(), axis), bool)
        if type(value) is not (bool if is_flag else int) or (not is_flag and value < 1):
            wanted = "true or false" if is_flag else "a whole number of at least 1"
            raise ForerunError(f"{place}: {axis}: expected {wanted}, got {str(value)[:60]!r}")
    return Strategy(**given)
