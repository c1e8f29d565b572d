"""Schedules jobs on a cluster of equal nodes under a policy."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.answers.jobs.job import Job, Scheduled
from forerun.answers.jobs.placement import Counted, Shape
from forerun.answers.jobs.placers import placer
from forerun.answers.jobs.policies import Ranking, policy
from forerun.answers.jobs.ranked import RankedSimulation
from forerun.answers.jobs.simulation import USUAL, QueueSimulation, Terms
from forerun.common.errors import ForerunError


def schedule(
    jobs: Sequence[Job],
    shape: Shape,
    policy_name: str = "fifo",
    placement: str = "count",
    terms: Terms = USUAL,
) -> list[Scheduled]:
    """Returns the outcome of every job, in the order of their ends.

    Raises:
        UnknownName: there is no such policy or placement.
        ForerunError: a job is larger than the cluster or the quota of its group, or `terms` need a placement on nodes.
    """
    place, rule = placer(placement, shape), policy(policy_name)
    for job in jobs:
        if not place.could_ever(job.gpus):
            raise ForerunError(f"job {job.name}: {job.gpus:,} GPUs have no place on {shape.total:,} under {placement}")
        if job.gpus > terms.quotas.get(job.group, job.gpus):
            raise ForerunError(f"job {job.name}: {job.gpus:,} GPUs are more than the quota of group {job.group}")
    for name, given in (("failures", terms.failures), ("network", terms.network)):
        if given is not None and isinstance(place, Counted):
            raise ForerunError(
                f"{name}: this needs to know the nodes of each job; choose placement packed, nearest, rails or spread"
            )
    if isinstance(rule, Ranking):
        return RankedSimulation(jobs, place, rule, terms).run()
    return QueueSimulation(jobs, place, rule, terms).run()
