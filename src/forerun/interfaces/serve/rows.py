"""Filters the plans of a search by the values of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.answers.search.outcome import Outcome, Status
from forerun.answers.search.result import SearchResult

_STATUS = {"fits": Status.OK, "does not fit": Status.TOO_LARGE, "not simulated": Status.SKIPPED}


def matching(result: SearchResult, wanted: Mapping[str, object], status: str) -> list[int]:
    """Returns the numbers of the plans whose fields have the values `wanted`.

    Plans that fit come first, the best of them before the others; then those that were not simulated, the least bound
    first; then those that do not fit, the least memory first. `status` is all or one of these.
    """
    outcome = result.outcome
    kept = np.ones(len(outcome.table), np.bool_)
    for name, value in wanted.items():
        kept &= _equal(outcome, name, value)
    if status != "all":
        kept &= outcome.status == _STATUS[status]
    rows = np.flatnonzero(kept)
    objective = np.where(outcome.status == Status.TOO_LARGE, outcome.need_gib, outcome.bound)
    memory = result.objective == "memory"
    for row, found in outcome.predictions.items():
        objective[row] = found.peak_reserved_gib if memory or not found.fits else found.step_time_s
    for row, needed in outcome.unfit.items():
        objective[row] = needed.peak_reserved_gib
    place = np.array([2, 2, 0, 3])  # by Status; skipped ones come before those that do not fit
    place[Status.SKIPPED] = 1
    order = np.lexsort((objective[rows], place[outcome.status[rows]]))
    return [int(row) for row in rows[order]]


def _equal(outcome: Outcome, name: str, value: object) -> npt.NDArray[np.bool_]:
    """Returns a mask of the plans with `value` in the field `name`, (n,)."""
    plans = outcome.table.rows(slice(None))
    values: list[Any] = list(plans.values[name])
    same = np.array([each == value for each in values], np.bool_)
    codes = plans.codes.get(name)
    return np.full(len(outcome.table), same[0]) if codes is None else same[codes]
