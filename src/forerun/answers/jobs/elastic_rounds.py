"""Runs jobs whose numbers of GPUs change while they run: a policy shares GPUs out in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from forerun.answers.jobs.elastic import Asked, elastic_policy
from forerun.answers.jobs.job import Job, Scaling, Scheduled
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.simulation import USUAL, Terms
from forerun.common.errors import ForerunError

ROUND_S = 60.0
"""seconds between two times at which GPUs are shared out (Pollux, section 4.2; Sia, section 3.5)"""


class _Elastic:
    """A job in rounds. It stands still for a restart whenever its GPUs change."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.scaling = job.scaling or Scaling((job.gpus,), (1.0,))
        self.left_s, self.gpus, self.speed = job.duration_s, 0, 0.0
        self.seen_s = self.goes_s = self.since_s = 0.0
        self.restarts = self.stops = 0
        self.ran: list[tuple[float, float, int]] = []

    def progress(self, now_s: float) -> None:
        """Notes what it has done by now."""
        self.left_s -= self.speed * max(0.0, now_s - max(self.seen_s, self.goes_s))
        self.seen_s = now_s

    @property
    def end_s(self) -> float:
        """Returns the time at which the job ends if its GPUs don't change."""
        return max(self.seen_s, self.goes_s) + self.left_s / self.speed if self.gpus else inf

    def move(self, gpus: int, now_s: float, restart_s: float) -> None:
        """Goes on with another number of GPUs."""
        self.progress(now_s)
        if self.gpus:
            self.ran.append((self.since_s, now_s, self.gpus))
        if gpus and (self.ran or self.gpus):
            self.restarts += 1
            self.goes_s = now_s + restart_s
        self.stops += bool(self.gpus) and not gpus
        self.gpus, self.since_s = gpus, now_s
        self.speed = self.scaling.speed(gpus) if gpus else 0.0


def share_out(jobs: Sequence[Job], shape: Shape, policy_name: str, terms: Terms = USUAL) -> list[Scheduled]:
    """Returns what becomes of every job, in the order in which they end.

    GPUs are shared out at the first round after jobs came or ended. A job without `scaling` runs on its own number.

    Raises:
        UnknownName: there is no such policy.
        ForerunError: the smallest number of GPUs of a job is more than the cluster has, or `terms` have failures or a
            network, which elastic jobs are not simulated with.
    """
    rule = elastic_policy(policy_name)
    for name, given in (("failures", terms.failures), ("network", terms.network)):
        if given is not None:
            raise ForerunError(f"{name}: policy {policy_name} is not simulated with it; leave one of them out")
    ordered = sorted(jobs, key=lambda job: job.submit_s)
    arriving = [_Elastic(job, number) for number, job in enumerate(ordered)][::-1]
    for each in arriving:
        if each.scaling.sizes[0] > shape.total:
            raise ForerunError(f"job {each.job.name}: {each.scaling.sizes[0]:,} GPUs are more than {shape.total:,}")
    own: list[_Elastic] = []
    ended: list[Scheduled] = []
    round_s = inf
    while arriving or own:
        arrival_s = arriving[-1].job.submit_s if arriving else inf
        now_s = min(arrival_s, round_s, min((job.end_s for job in own), default=inf))
        if now_s == inf:
            raise ForerunError(f"the policy never starts {own[0].job.name}")
        done = [job for job in own if job.end_s <= now_s]
        for job in done:
            own.remove(job)
            ended.append(_scheduled(job, now_s))
        came = False
        while arriving and arriving[-1].job.submit_s <= now_s:
            own.append(arriving.pop())
            came = True
        if done or came:
            round_s = min(round_s, ROUND_S * ceil(now_s / ROUND_S))
        if now_s >= round_s:
            round_s = inf
            asked = [Asked(j.scaling, j.gpus, now_s - j.job.submit_s, j.restarts, terms.resume_s) for j in own]
            given_gpus = rule.share(asked, shape.total)
            for job, gpus in zip(own, given_gpus, strict=True):
                if gpus != job.gpus:
                    job.move(gpus, now_s, terms.resume_s)
    return ended


def _scheduled(job: _Elastic, now_s: float) -> Scheduled:
    periods = [*job.ran, (job.since_s, now_s, job.gpus)]
    ran = tuple((begin_s, end_s) for begin_s, end_s, _ in periods)
    return Scheduled(job.job, ran[0][0], now_s, job.stops, ran, held=tuple(gpus for *_, gpus in periods))
