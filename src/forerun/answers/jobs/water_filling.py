"""Max-min fairness by water filling: a job gets more if that takes nothing from a job with less (Gavel, OSDI'20).

Plain max-min fairness makes the smallest part of all jobs as large as it can be, and says nothing of the others. Here
all jobs rise together until some can't rise further; these keep what they have, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forerun.answers.jobs.interior_point import Rows, Vector, optimum
from forerun.answers.jobs.shares import Demand, Shares, limits_of, progress_of

Flags: TypeAlias = npt.NDArray[np.bool_]
_KEPT = 1.0 - 1e-9
"""share of its progress that a job keeps for certain while others rise, so that the program has room to move"""


class WaterFilling(Shares):
    """The smallest part is as large as it can be, then the next one, and so on, by what a job does with all in turn."""

    def of(self, demand: Demand) -> Vector:
        """Returns these shares."""
        return filled(demand, _per_step(demand) / demand.weights, lambda rises: np.ones(len(rises)))


class WaterFillingByGroup(Shares):
    """Groups rise by their weights; a job that can't rise leaves what is due to it to the others of its group.

    Within a group jobs rise by their weights, or one after the other in order of arrival (Gavel's entities).
    """

    def of(self, demand: Demand) -> Vector:
        """Returns these shares."""
        group_of = np.array(demand.group_of or [0] * len(demand.gpus))

        def speeds(rises: Flags) -> Vector:
            found = np.zeros(len(rises))
            for number, group in enumerate(demand.groups):
                own = np.flatnonzero(rises & (group_of == number))[: 1 if group.in_order else None]
                found[own] = group.weight * demand.weights[own] / demand.weights[own].sum()
            return found

        return filled(demand, _per_step(demand), speeds)


def _per_step(demand: Demand) -> Vector:
    """Returns how much a step counts: over the steps a second with all GPUs in turn, times the job's GPUs."""
    in_turn: Vector = demand.rates @ demand.workers / demand.workers.sum()
    return demand.gpus / in_turn


def filled(demand: Demand, per_step: Vector, speeds: Callable[[Flags], Vector]) -> Vector:
    """Returns the shares after the progress of all jobs rose until none of them could rise further.

    Args:
        speeds: how fast each job rises, given which of them still can; 0 for one that waits for others.
    """
    rows, limits = limits_of(demand)
    number, jobs = rows.shape[1], len(per_step)
    gains = progress_of(demand, per_step)
    unit = float(gains.value.max())
    goal = np.zeros(number + 1)
    goal[-1] = 1.0
    rises, shares = np.ones(jobs, dtype=bool), np.zeros(number)
    speed = speeds(rises)
    level, start = np.zeros(jobs), np.zeros(jobs)
    """where each job stands, and where it would have begun if it had always risen as fast as now"""
    while rises.any():
        up = np.flatnonzero(speed)
        behind = Rows(
            np.concatenate([gains.row, up]),
            np.concatenate([gains.column, np.full(len(up), number)]),
            np.concatenate([gains.value / -unit, speed[up]]),
            (jobs, number + 1),
        )
        least = np.where(speed > 0.0, -start, level * -_KEPT)
        found = optimum(goal, Rows.stacked([rows, behind], number + 1), np.concatenate([limits, least]))
        shares, height = found.x[:-1], float(found.x[-1])
        # A job that can rise further has room in the middle of all best shares, and one that can't has a price.
        price, room = found.price[-jobs:], found.slack[-jobs:]
        stuck = (speed > 0.0) & (price > room)
        if not stuck.any():
            stuck[up[np.argmax(price[up] / room[up])]] = True
        level[up] = start[up] + speed[up] * height
        rises &= ~stuck
        after = np.where(rises, speeds(rises), 0.0)
        changed = after != speed
        start[changed] = level[changed] - after[changed] * height
        speed = after
    return np.asarray(np.clip(shares.reshape(-1, len(demand.workers)), 0.0, 1.0), np.float64)
