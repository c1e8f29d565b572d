"""Plans with other values of some fields, each made once: many plans of a search differ in nothing but these fields."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import Plan


class OtherFields:
    """Returns plans with other values of the fields `names`. To look up a plan takes less time than to make it."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._rest = attrgetter(*(name for name in FIELD_TYPES if name not in names))
        self._made: dict[tuple[object, ...], Plan] = {}

    def __call__(self, plan: Plan, *values: object) -> Plan:
        """Returns `plan` with the `values` of the fields, in the order of their names."""
        key = (values, self._rest(plan))
        made = self._made.get(key)
        if made is None:
            changed = dict(zip(self._names, values, strict=True))
            made = self._made[key] = replace(plan, **changed)  # type: ignore[arg-type]
        return made
