"""Says in one line why the plans that a user asks about are not the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.answers.search.result import SearchResult
from forerun.answers.search.space import Space, Tally
from forerun.describe.plan.fields import FIELD_TYPES, FOLLOWING
from forerun.describe.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for a plan, or for the best of several."""

    text: str
    plan: Plan | None
    """the plan; None if no such plan was considered"""


def why(result: SearchResult, wanted: Mapping[str, object], alone: Space) -> Verdict:
    """Returns the verdict of the search on the plans whose fields have the values `wanted`.

    `alone` is the space of the same question with these values fixed. It tells which rule such plans break, or that
    they are possible but were not searched.
    """
    columns = result.columns()
    rows = np.flatnonzero(_matching(result, columns, wanted))
    if not len(rows):
        return _not_considered(result, alone)
    status, objective = columns["status"][rows], columns["objective"][rows]
    several = f"{len(rows):,} such plans, {_counts(status)}; " if len(rows) > 1 else ""
    if (status == "ok").any():
        row = int(rows[0])  # plans that fit come first, the best of them before the others
        best = "the best has " if several else ""
        return Verdict(several + best + _rank(result, row), result.ranked[row].own_plan())
    if (status == "skipped").any():
        row = int(rows[status == "skipped"][np.argmin(objective[status == "skipped"])])
        skipped = result.skipped[row - len(result.ranked) - len(result.too_large)]
        return Verdict(
            f"{several or 'not simulated, '}{'the best of them ' if several else ''}{skipped.reason}", skipped.plan
        )
    large = result.too_large[int(rows[0]) - len(result.ranked)]
    return Verdict(f"{several or 'does not fit, '}{'the nearest miss ' if several else ''}{large.reason}", large.plan)


def _counts(status: NDArray[np.str_]) -> str:
    """Returns the numbers of plans that fit, were not simulated, and do not fit, in words and without zeros."""
    words = {"ok": "fit", "skipped": "not simulated", "out_of_memory": "do not fit"}
    numbers = {word: int((status == name).sum()) for name, word in words.items()}
    return ", ".join(f"{number:,} {word}" for word, number in numbers.items() if number)


def _matching(
    result: SearchResult, columns: Mapping[str, NDArray[np.generic]], wanted: Mapping[str, object]
) -> NDArray[np.bool_]:
    """Returns a mask of the rows of `columns` that have the wanted values, (n,)."""
    found = np.ones(len(columns["status"]), np.bool_)
    if not len(found):
        return found
    every = _any_plan(result)
    for name, value in wanted.items():
        if name not in columns:
            found &= getattr(every, name) == value
        elif columns[name].dtype == object:
            found &= np.array([each == value for each in columns[name]], np.bool_)
        else:
            found &= columns[name] == value
    return found


def _any_plan(result: SearchResult) -> Plan:
    if result.ranked:
        return result.ranked[0].own_plan()
    return (result.too_large[0] if result.too_large else result.skipped[0]).plan


def _rank(result: SearchResult, row: int) -> str:
    best, found = result.ranked[0], result.ranked[row]
    if result.objective == "memory":
        value, least, unit = found.peak_reserved_gib, best.peak_reserved_gib, "GiB"
    else:
        value, least, unit = found.step_time_s, best.step_time_s, "s"
    more = "" if row == 0 else f", {value / least - 1:.1%} more than the best"
    return f"rank {row + 1:,} of {len(result.ranked):,}: {value:.4g} {unit}{more}"


def _not_considered(result: SearchResult, alone: Space) -> Verdict:
    tally = Tally()
    possible = next(alone.plans(tally), None)
    if possible is not None:
        reason = result.reason_of(possible)
        standing = result.outcome.standing_for(possible)
        if standing is not None:
            found = why(result, {name: getattr(standing, name) for name in FIELD_TYPES if name not in FOLLOWING}, alone)
            return Verdict(f"{reason}: {found.text}", standing)
        if reason:
            return Verdict(reason, possible)
        return Verdict("possible, but outside of the space that was searched; give these values as options", possible)
    if not tally.considered:
        return Verdict(f"the degrees do not divide {alone.n_gpus} GPUs", None)
    rule, number = tally.impossible.most_common(1)[0]
    return Verdict(f"impossible, {rule} ({number:,} of {tally.considered:,}): {tally.examples[rule]}", None)
