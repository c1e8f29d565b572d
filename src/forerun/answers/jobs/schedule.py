"""Schedules jobs on a cluster of equal nodes under a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.job import Job, Scheduled
from forerun.answers.jobs.placement import Counted, Shape, placer
from forerun.answers.jobs.policies import Ranking, policy
from forerun.answers.jobs.ranked import RankedSimulation
from forerun.answers.jobs.simulation import QueueSimulation
from forerun.common.errors import ForerunError


def schedule(
    jobs: Sequence[Job],
    shape: Shape,
    policy_name: str = "fifo",
    placement: str = "count",
    resume_s: float = 0.0,
    *,
    failures: NodeFailures | None = None,
    quotas: Mapping[str, int] | None = None,
) -> list[Scheduled]:
    """Returns what becomes of every job, in the order in which they end.

    Args:
        resume_s: seconds that a job loses when it runs again after it was stopped.
        failures: of nodes; needs a placement on nodes.
        quotas: GPUs that a group may have at once, under policies that ask for it.

    Raises:
        UnknownName: there is no such policy or placement.
        ForerunError: a job is larger than the cluster or the quota of its group, or failures find no nodes.
    """
    place, rule = placer(placement, shape), policy(policy_name)
    for job in jobs:
        if not place.could_ever(job.gpus):
            raise ForerunError(f"job {job.name}: {job.gpus:,} GPUs have no place on {shape.total:,} under {placement}")
        if quotas and job.gpus > quotas.get(job.group, job.gpus):
            raise ForerunError(f"job {job.name}: {job.gpus:,} GPUs are more than the quota of group {job.group}")
    if failures is not None and isinstance(place, Counted):
        raise ForerunError("failures need to know on which nodes jobs are: choose placement packed or spread")
    if isinstance(rule, Ranking):
        return RankedSimulation(jobs, place, rule, resume_s, failures).run()
    return QueueSimulation(jobs, place, rule, resume_s, failures, quotas).run()
