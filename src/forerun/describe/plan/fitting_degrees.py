"""Finds the parallel degrees that a model can run with, for the message that refuses another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan

_BELOW, _ABOVE = 5, 1
"""most values named below and above the one that is refused"""
_TRIED = 1024
"""most values tried on either side, so that a refusal of tp 2,000,000 comes at once"""


def fitting_degrees(plan: Plan, degree: str, runs: Callable[[Plan], bool]) -> list[int]:
    """Returns the values of the field `degree` next to the plan's own with which `runs` says yes, in order."""

    def fits(value: int) -> bool:
        try:
            return runs(replace(plan, **{degree: value}))  # type: ignore[arg-type]
        except ForerunError:
            return False

    own = getattr(plan, degree)
    below = [value for value in range(1, min(own, _TRIED + 1)) if fits(value)]
    above = [value for value in range(own + 1, own + min(own, _TRIED) + 1) if fits(value)]
    return below[-_BELOW:] + above[:_ABOVE]


def fitting_words(degree: str, values: list[int]) -> str:
    """Returns the end of a message that names the `values` that fit; empty where none does."""
    if not values:
        return ""
    *others, last = map(str, values)
    return f"; {degree} {', '.join(others)} or {last} fits" if others else f"; {degree} {last} fits"
