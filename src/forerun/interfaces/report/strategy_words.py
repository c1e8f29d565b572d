"""Strategies of an exploration in words."""

from __future__ import annotations

from forerun.astrasim.dse.workload import Strategy

_DEGREES = ("dp", "tp", "sp", "pp", "ep")


def strategy_words(strategy: Strategy) -> str:
    """`dp8 tp4 sp2 sharded recompute`; degrees of pp and ep above 1 only."""
    words = [
        f"{name}{getattr(strategy, name)}" for name in _DEGREES if name in _DEGREES[:3] or _above_1(strategy, name)
    ]
    words += ["sharded"] * strategy.weight_sharded + ["recompute"] * strategy.activation_recompute
    return " ".join(words)


def _above_1(strategy: Strategy, name: str) -> bool:
    return bool(getattr(strategy, name) > 1)


def value_words(value: int | bool) -> str:
    """The value of an axis: a number, yes or no."""
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"
