"""How fairly jobs share a cluster, and how much of it is idle while they wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from forerun.answers.jobs.interior_point import Vector
from forerun.answers.jobs.job import Scheduled


def finish_time_ratios(jobs: Sequence[Scheduled], gpus: int) -> Vector:
    """Returns for each job its completion time over that on an equal part of the cluster for itself.

    The part is 1 / n of all `gpus`, and n is the mean number of jobs that wait or run at the same time. A job that asks
    for more GPUs than its part gets all of them for its share of the time. Below 1 a job gains by sharing (Themis,
    NSDI'20, whose n is the number of jobs that contend at that moment).
    """
    submitted = np.array([job.job.submit_s for job in jobs])
    ended = np.array([job.end_s for job in jobs])
    came_s = _since(submitted, ended) - _since(submitted, submitted)
    gone_s = _since(ended, ended) - _since(ended, submitted)
    least_s = np.spacing(ended)  # in floats a short job late in a run ends when it comes
    contending = (came_s - gone_s) / np.maximum(ended - submitted, least_s)
    asked = np.array([float(job.job.gpus) for job in jobs])
    alone_s = np.array([job.job.duration_s for job in jobs]) * np.maximum(1.0, asked * contending / gpus)
    return np.asarray((ended - submitted) / alone_s)


def _since(begins: Vector, times: Vector) -> Vector:
    """Returns for each of `times` the sum of the seconds since all `begins` before it."""
    order = np.sort(begins)
    sums = np.concatenate([[0.0], np.cumsum(order)])
    number = np.searchsorted(order, times)
    return np.asarray(number * times - sums[number])


def fragmentation(jobs: Sequence[Scheduled], gpus: int) -> float:
    """Returns the share of GPU time that lies free while a job waits that asks for no more GPUs than are free.

    They lie scattered over nodes, are under repair, or the policy keeps them for another job. The share is of all GPU
    time from the first submission to the last end.
    """
    changes: list[tuple[float, float, int]] = []
    """(time, change of the GPUs in use, GPUs that a job begins to wait for; negative: it stops waiting)"""
    for job in jobs:
        free_s = job.job.submit_s
        for begin_s, end_s, held in job.periods:
            if begin_s > free_s:
                changes += [(free_s, 0, job.job.gpus), (begin_s, 0, -job.job.gpus)]
            changes += [(begin_s, held, 0), (end_s, -held, 0)]
            free_s = end_s
    changes.sort(key=lambda change: change[0])
    waiting: list[int] = []
    used, lost = 0.0, 0.0
    for (time_s, more, waits), (next_s, *_) in pairwise([*changes, (changes[-1][0], 0, 0)]):
        used += more
        if waits > 0:
            insort(waiting, waits)
        elif waits < 0:
            del waiting[bisect_left(waiting, -waits)]
        if waiting and waiting[0] <= gpus - used:
            lost += (gpus - used) * (next_s - time_s)
    return lost / (gpus * (changes[-1][0] - min(job.job.submit_s for job in jobs)))
