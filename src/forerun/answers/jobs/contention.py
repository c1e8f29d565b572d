"""Jobs that share links of the network slow each other, by the phases of their steps.

A job computes, then communicates, over and over. On a topology, communication takes longer where the GPUs of a job lie
farther from each other than they need to. Jobs that communicate at the same time share each full link by max-min
fair rates. Whether they do depends on how their phases stand to each other; CASSINI (NSDI'24) shifts them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from forerun.answers.jobs.job import Placement, Traffic
from forerun.answers.jobs.job_traffic import (
    Link,
    Loads,
    loads_of_switches,
    loads_of_topology,
    longest_s,
    numbered,
)
from forerun.answers.jobs.long_run import paces_together
from forerun.answers.jobs.nearest import Nearest
from forerun.answers.jobs.placement import Shape
from forerun.core.network.network_file import Network

_NOTHING = 1e-12


class Running(Protocol):
    """A job that runs, as its links see it."""

    number: int
    place: Placement
    on_rails: bool

    @property
    def traffic(self) -> Traffic | None:
        """Returns its step; None if it sends nothing that is known."""


@dataclass(frozen=True, slots=True)
class SharedNetwork:
    """The links above the nodes: one of each node if its GPUs share it, and those of each switch to the others."""

    oversubscription: float
    """bandwidth of a switch's nodes over that of its links to other switches"""
    shared_nics: bool
    """whether all jobs on a node share one link; else each GPU has its own"""
    shifts: bool
    """whether jobs are started so that their phases of communication fall apart"""
    rails: bool = False
    """whether GPU i of all nodes of a switch is on rail switch i, above which traffic between rails goes"""
    nvlink_domains: bool = False
    """whether NVLink joins the nodes of a domain, so that jobs inside one send nothing over the network"""
    topology: Network | None = None
    """the links between all GPUs, in place of those of nodes and switches"""

    def capacity(self, link: Link, shape: Shape) -> float:
        """Returns the rate of a link, over that of a node, or over its own on a topology."""
        return shape.nodes / self.oversubscription if link[0] == "switch" else 1.0

    def loads(self, jobs: Sequence[Running], shape: Shape) -> dict[int, tuple[Loads, ...]]:
        """Returns for each job with traffic, by number, the load of each part of its communication on the links."""
        found: dict[int, tuple[Loads, ...]] = {}
        gpus = [()] * len(jobs) if self.topology is None else numbered([job.place for job in jobs], shape.gpus)
        for job, own in zip(jobs, gpus, strict=True):
            if job.traffic is None or len(job.place) < 2:
                continue
            parts = job.traffic.parts
            if self.topology is not None:
                found[job.number] = tuple(loads_of_topology(each, own, shape.gpus, self.topology) for each in parts)
                continue
            off_rails = self.rails and not job.on_rails
            how = (job.place, shape, self.shared_nics, off_rails, self.nvlink_domains)
            found[job.number] = tuple(loads_of_switches(each, *how) for each in parts)
        return found

    def alone(self, jobs: Sequence[Running], shape: Shape) -> dict[int, tuple[float, ...]]:
        """Returns for each job with traffic, by number, how long its parts take where it lies, without other jobs.

        On a topology a part takes as much longer than stated as its fullest link takes longer than if the job's GPUs
        lay as near to each other as they can.
        """
        found: dict[int, tuple[float, ...]] = {}
        gpus = [()] * len(jobs) if self.topology is None else numbered([job.place for job in jobs], shape.gpus)
        for job, own in zip(jobs, gpus, strict=True):
            if job.traffic is None or len(job.place) < 2:
                continue
            stretches = [1.0 for _ in job.traffic.parts]
            if self.topology is not None:
                near = _nearest(len(own), shape)
                for i, part in enumerate(job.traffic.parts):
                    usual_s = longest_s(part, near, shape.gpus, self.topology)
                    here_s = longest_s(part, own, shape.gpus, self.topology)
                    stretches[i] = max(1.0, here_s / usual_s) if usual_s else 1.0
            parts = zip(job.traffic.parts, stretches, strict=True)
            found[job.number] = tuple(part.seconds * stretch for part, stretch in parts)
        return found

    def paces(self, jobs: Sequence[Running], shape: Shape) -> dict[int, float]:
        """Returns for jobs by number how fast they go on, against alone on the nearest GPUs; the others go at 1."""
        loads, alone_s = self.loads(jobs, shape), self.alone(jobs, shape)
        traffic = {job.number: job.traffic for job in jobs if job.traffic is not None}
        found: dict[int, float] = {}
        for number, parts_s in alone_s.items():
            step_s = traffic[number].compute_s + sum(part.seconds for part in traffic[number].parts)
            own_s = traffic[number].compute_s + sum(parts_s)
            if own_s > step_s * (1.0 + _NOTHING):
                found[number] = step_s / own_s
        for number, pace in self._beside_others(loads, alone_s, traffic, shape).items():
            found[number] = pace * found.get(number, 1.0)
        return found

    def _beside_others(
        self,
        loads: Mapping[int, tuple[Loads, ...]],
        alone_s: Mapping[int, tuple[float, ...]],
        traffic: Mapping[int, Traffic],
        shape: Shape,
    ) -> dict[int, float]:
        """Returns the pace of each job that shares a full link, relative to its pace alone on the same GPUs."""
        users: dict[Link, dict[int, float]] = {}
        for number, parts in loads.items():
            for link, load in (each for part in parts for each in part):
                of_link = users.setdefault(link, {})
                of_link[number] = max(load, of_link.get(number, 0.0))
        room = {link: self.capacity(link, shape) * (1.0 + _NOTHING) for link in users}
        full = {link: each for link, each in users.items() if sum(each.values()) > room[link]}
        found: dict[int, float] = {}
        for group in _groups(full.values()):
            links = sorted({link for number in group for part in loads[number] for link, _ in part if link in full})
            place = {link: i for i, link in enumerate(links)}
            steps = tuple(
                (
                    (traffic[number].compute_s, ()),
                    *(
                        (seconds, tuple((place[link], load) for link, load in own if link in place))
                        for seconds, own in zip(alone_s[number], loads[number], strict=True)
                    ),
                )
                for number in group
            )
            capacities = tuple(self.capacity(link, shape) for link in links)
            found |= dict(zip(group, paces_together(steps, capacities, self.shifts), strict=True))
        return found


@lru_cache(maxsize=1024)
def _nearest(gpus: int, shape: Shape) -> tuple[int, ...]:
    """Returns the numbers of GPUs of an empty cluster that lie as near to each other as they can."""
    place = Nearest(shape).place(gpus)
    assert place is not None, "a job that runs has no more GPUs than there are"
    return numbered([place], shape.gpus)[0]


def _groups(users: Iterable[Iterable[int]]) -> list[list[int]]:
    """Returns the jobs that are joined by common links, each group in order."""
    groups: list[set[int]] = []
    for each in users:
        joined = set(each).union(*(group for group in groups if not group.isdisjoint(each)))
        groups = [group for group in groups if group.isdisjoint(each)] + [joined]
    return sorted(sorted(group) for group in groups)
