"""neighbours: the plans that differ from a plan in a single choice, which shows the gain or cost of the choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forerun.answers.search.outcome import Rows
from forerun.answers.search.result import SearchResult
from forerun.core.program.types import F64
from forerun.describe.plan.plan import Plan

CHOSEN = (
    *("tp", "cp", "pp", "ep", "dp_replicate", "zero_stage", "reshard_after_forward", "micro_batch", "pp_schedule"),
    *("virtual_stages", "activation_checkpointing", "selective_policy", "compile", "cp_method", "stack"),
)
"""fields of a plan that a person chooses; the other ones follow from them and the question"""
_MOST_ALSO = 2
"""other fields that may change with a choice; a plan that differs in more is not a neighbour"""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan with another value of one field, and with as many of the other values as any plan has."""

    field: str
    value: object
    plan: Plan
    row: int
    """number of the plan in the table of the search"""
    also: tuple[str, ...]
    """other fields that have to change with it"""


def neighbours(result: SearchResult, plan: Plan, values: int = 2) -> list[Neighbour]:
    """Returns the neighbours of `plan` among the plans of a search, at most `values` for each field.

    Of plans that are equally close, the one with the least bound stands for the value. A plan comes once, under the
    first of the fields that set it apart.
    """
    table = result.outcome.table
    columns = {name: table.codes_of(name) for name in CHOSEN if name in _varied(result)}
    same = {name: column == _code(result, name, plan) for name, column in columns.items()}
    if not same:
        return []
    differing = sum((~each).astype(np.int64) for each in same.values())
    found: dict[int, Neighbour] = {}
    for name in columns:
        others = np.flatnonzero(~same[name])
        for row in _nearest(columns[name][others], np.asarray(differing)[others], result.outcome.bound[others], values):
            number = int(others[row])
            other = table.plan(number)
            also = tuple(each for each in same if each != name and not same[each][number])
            if len(also) <= _MOST_ALSO:
                found.setdefault(number, Neighbour(name, getattr(other, name), other, number, also))
    return list(found.values())


def _varied(result: SearchResult) -> frozenset[str]:
    table = result.outcome.table
    return frozenset(table.meshes.codes) | frozenset(table.variants.codes)


def _code(result: SearchResult, name: str, plan: Plan) -> int:
    """Returns the code of the plan's own value; -1 if no plan of the search has it."""
    table = result.outcome.table
    values = list(table.meshes.values[name] if name in table.meshes.codes else table.variants.values[name])
    return values.index(getattr(plan, name)) if getattr(plan, name) in values else -1


def _nearest(codes: Rows, differing: Rows, bound: F64, values: int) -> Iterator[int]:
    """Yields the row of the closest plan of each value, for the `values` values with the least bounds."""
    order = np.lexsort((bound, differing))
    _, first = np.unique(codes[order], return_index=True)
    rows = order[first]
    yield from rows[np.lexsort((bound[rows], differing[rows]))][:values].tolist()
