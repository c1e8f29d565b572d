"""Max-min fairness by water filling: a job gets more if that takes nothing from a job with less (Gavel, OSDI'20).

Plain max-min fairness makes the smallest part of all jobs as large as it can be, and says nothing of the others. Here
all jobs rise together until some can't rise further; these keep what they have, and the others go on.
"""

from __future__ import annotations

import numpy as np

from forerun.answers.jobs.interior_point import Rows, Vector, optimum
from forerun.answers.jobs.shares import Demand, Shares, limits_of, progress_of

_KEPT = 1.0 - 1e-9
"""share of its progress that a job keeps for certain while others rise, so that the program has room to move"""


class WaterFilling(Shares):
    """Makes the smallest part as large as possible, then the next one, and so on. A job's part is its speed over its
    mean speed on all GPUs.
    """

    def of(self, demand: Demand) -> Vector:
        """Returns these shares."""
        in_turn = demand.rates @ demand.workers / demand.workers.sum()
        return filled(demand, demand.gpus / (demand.weights * in_turn))


def filled(demand: Demand, per_step: Vector) -> Vector:
    """Returns the shares with the largest sorted progress of all jobs, compared from the smallest on."""
    rows, limits = limits_of(demand)
    number, jobs = rows.shape[1], len(per_step)
    gains = progress_of(demand, per_step)
    unit = float(gains.value.max())
    goal = np.zeros(number + 1)
    goal[-1] = 1.0
    kept, rises = np.zeros(jobs), np.ones(jobs, dtype=bool)
    shares = np.zeros(number)
    while rises.any():
        up = np.flatnonzero(rises)
        behind = Rows(
            np.concatenate([gains.row, up]),
            np.concatenate([gains.column, np.full(len(up), number)]),
            np.concatenate([gains.value / -unit, np.ones(len(up))]),
            (jobs, number + 1),
        )
        least = np.where(rises, 0.0, kept * -_KEPT)
        found = optimum(goal, Rows.stacked([rows, behind], number + 1), np.concatenate([limits, least]))
        shares = found.x[:-1]
        # A job that can rise further has room in the middle of all best shares, and one that can't has a price.
        price, room = found.price[-jobs:], found.slack[-jobs:]
        stuck = rises & (price > room)
        if not stuck.any():
            stuck[up[np.argmax(price[up] / room[up])]] = True
        kept[stuck] = float(found.x[-1])
        rises &= ~stuck
    return np.asarray(np.clip(shares.reshape(-1, len(demand.workers)), 0.0, 1.0), np.float64)
