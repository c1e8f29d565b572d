"""Elastic jobs: their goodput on each number of GPUs, and the policies that choose the numbers.

Goodput is examples per second times statistical efficiency (Pollux, OSDI'21; Sia, SOSP'23): a larger batch keeps more
GPUs busy, but the model learns less from each of its examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from forerun.answers.jobs.job import Scaling
from forerun.common.errors import UnknownName

Choices: TypeAlias = Sequence[tuple[int, float]]
"""(GPUs, how good it is to have them) of one job, GPUs ascending"""
Curve: TypeAlias = tuple[Choices, Choices]
"""choices, and those of them on their concave hull from none to the best one"""
_SIA_POWER = -0.5
_SIA_WITHOUT = -1.1
"""the value of no GPUs to Sia, if the smallest number of GPUs has the value -1"""
_MUCH = 1e9
"""how bad no GPUs are under a policy that gives all jobs some as long as there are any"""
_LEAST_FACTOR = 1e-3


def efficiency(batch: float, first_batch: float, noise_scale: float) -> float:
    """Returns the statistical efficiency of an example relative to the first batch size: (phi + M0) / (phi + M)
    (Pollux, OSDI'21).

    `noise_scale` is the gradient noise scale phi in examples (McCandlish et al., arXiv 1812.06162).
    """
    return (noise_scale + first_batch) / (noise_scale + batch)


def step_s(batch: float, gpus: int, example_s: float, sync_s: float, overlap: float) -> float:
    """Returns the seconds of a step (Pollux, OSDI'21): overlap 1 adds computation and exchange, more hides the less."""
    compute_s = batch / gpus * example_s
    return float((compute_s**overlap + sync_s**overlap) ** (1.0 / overlap))


@dataclass(frozen=True, slots=True)
class Asked:
    """A job that has not ended, when GPUs are shared out anew."""

    scaling: Scaling
    gpus: int
    """that it has now; 0 while it waits"""
    age_s: float
    restarts: int
    restart_s: float
    """seconds of a restart on another number of GPUs"""

    @property
    def is_free(self) -> bool:
        """Returns whether it loses nothing by getting any number of GPUs that it can run on."""
        return (
            not self.restart_s
            or not (self.gpus or self.restarts)
            or (len(self.scaling.sizes) == 1 and self.gpus == self.scaling.sizes[0])
        )

    @property
    def kept(self) -> float:
        """Returns the share of its time that is left for training if it moves now, and as often as so far."""
        if self.is_free:
            return 1.0
        kept_s = self.age_s - self.restarts * self.restart_s
        return min(1.0, max(_LEAST_FACTOR, kept_s / (self.age_s + self.restart_s)))

    def speeds(self) -> list[tuple[int, float]]:
        """Returns the numbers of GPUs on which the job can run, and its speed on each, reduced by the cost of a
        move.
        """
        own, kept, now = self.scaling, self.kept, self.gpus
        if kept == 1.0:
            return list(zip(own.sizes, own.speeds, strict=True))
        return [
            (size, speed if size == now else speed * kept) for size, speed in zip(own.sizes, own.speeds, strict=True)
        ]


class Elastic(ABC):
    """Shares GPUs out among jobs, to each one of the numbers that it can run on, or none."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Scaling, Curve]] = {}
        """of jobs that lose nothing by a move, by the identity of their scaling, which is kept with it"""

    @abstractmethod
    def usual(self, scaling: Scaling, fair: int) -> int:
        """Returns the GPUs to which others are compared; `fair` is an equal part of the cluster."""

    @abstractmethod
    def choices(self, job: Asked, usual: int) -> Choices:
        """Returns the value of each number of GPUs for a job, relative to the usual number."""

    def share(self, jobs: Sequence[Asked], total: int) -> list[int]:
        """Returns the GPUs of each job; those that come first go first where not all can run."""
        fair = max(1, total // max(1, len(jobs)))
        return _best([self._curve(job, self.usual(job.scaling, fair)) for job in jobs], total)

    def _curve(self, job: Asked, usual: int) -> Curve:
        if not job.is_free:
            return _with_hull(self.choices(job, usual))
        key = (id(job.scaling), usual)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = job.scaling, _with_hull(self.choices(job, usual))
        return found[1]


class Pollux(Elastic):
    """Makes the harmonic mean of all jobs' speedups over an equal part of the cluster the largest (Pollux, OSDI'21)."""

    def usual(self, scaling: Scaling, fair: int) -> int:
        """Returns the most GPUs of an equal part."""
        return scaling.sizes[max(0, bisect_right(scaling.sizes, fair) - 1)]

    def choices(self, job: Asked, usual: int) -> Choices:
        """Returns minus the reciprocal of each speedup."""
        before = job.scaling.speed(usual)
        return [(0, -_MUCH), *((size, -before / speed) for size, speed in job.speeds())]


class Sia(Elastic):
    """Makes the sum of goodputs, each over that on the job's fewest GPUs and to the power -0.5, the best.

    Sia (SOSP'23) does so with its fairness of -0.5 and 1.1 for no GPUs, on GPUs of one kind here.
    """

    def usual(self, scaling: Scaling, fair: int) -> int:
        """Returns the fewest GPUs."""
        return scaling.sizes[0]

    def choices(self, job: Asked, usual: int) -> Choices:
        """Returns minus that power of each goodput."""
        least = job.scaling.speed(usual)
        return [(0, _SIA_WITHOUT), *((size, -((speed / least) ** _SIA_POWER)) for size, speed in job.speeds())]


def best_sizes(jobs: Sequence[Choices], total: int) -> list[int]:
    """Returns the GPUs of each job, at most `total` in all, with nearly the largest sum of values.

    It takes steps on the concave hulls of all jobs in the order of their gain per GPU, as long as they fit. The best
    choice gains at most one step more.
    """
    return _best([_with_hull(each) for each in jobs], total)


def _with_hull(choices: Choices) -> Curve:
    return choices, _hull(choices)


def _best(jobs: Sequence[Curve], total: int) -> list[int]:
    hulls = [hull for _, hull in jobs]
    size = [hull[0][0] for hull in hulls]
    left = total - sum(size)
    steps = [_step(hull, i, 0) for i, hull in enumerate(hulls) if len(hull) > 1]
    heapify(steps)
    while steps and left:
        _, i, at = heappop(steps)
        more = hulls[i][at + 1][0] - size[i]
        if more > left:
            better = [one for one in jobs[i][0] if size[i] < one[0] <= size[i] + left]
            if better and max(worth for _, worth in better) > hulls[i][at][1]:
                found = max(better, key=lambda one: one[1])[0]
                left -= found - size[i]
                size[i] = found
            continue
        size[i] += more
        left -= more
        if at + 2 < len(hulls[i]):
            heappush(steps, _step(hulls[i], i, at + 1))
    return size


def _step(hull: Choices, job: int, at: int) -> tuple[float, int, int]:
    (gpus, worth), (more, better) = hull[at], hull[at + 1]
    return ((worth - better) / (more - gpus), job, at)


def _hull(choices: Choices) -> list[tuple[int, float]]:
    """Returns the choices that are on the concave hull from the first to the best one."""
    choice = iter(choices)
    size, worth = next(choice)
    kept = [(size, worth)]
    slopes: list[float] = []
    """from each choice to the next one"""
    for more, better in choice:
        if better <= worth:
            continue
        slope = (better - worth) / (more - size)
        while slopes:
            size, worth = kept[-2]
            further = (better - worth) / (more - size)
            if slopes[-1] > further:
                break
            kept.pop()
            slopes.pop()
            slope = further
        kept.append((more, better))
        slopes.append(slope)
        size, worth = more, better
    return kept


ELASTIC: Mapping[str, Callable[[], Elastic]] = {"pollux": Pollux, "sia": Sia}
"""name -> policy that chooses how many GPUs each job has"""


def elastic_policy(name: str) -> Elastic:
    """Returns a new policy called `name`. Raises UnknownName if there is none."""
    if name not in ELASTIC:
        raise UnknownName("policy for elastic jobs", name, list(ELASTIC))
    return ELASTIC[name]()
