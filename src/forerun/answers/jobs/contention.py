"""Jobs that share links of the network slow each other, by the phases of their steps.

A job computes, then communicates, over and over. Jobs that communicate at the same time share each full link by max-min
fair rates. Whether they do depends on how their phases stand to each other; CASSINI (NSDI'24) shifts them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from forerun.answers.jobs.job import Placement, Progress, Traffic
from forerun.answers.jobs.placement import Shape

Link = tuple[str, int]
_STEPS = 20
"""steps of the slowest job, alone, over which paces are measured"""
_MOST_PHASES = 4_000
"""phases of all jobs after which they are measured in any case"""
_SHIFTS = 24
"""places in a job's step at which it may begin"""
_NOTHING = 1e-12


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

    def links(self, place: Placement, shape: Shape, on_rails: bool = True) -> tuple[Link, ...]:
        """Returns the links that a job's traffic goes over, as that of rings through all its nodes does.

        `on_rails`: the job has the same GPUs of each of its nodes.
        """
        domains = {node // shape.domain for node, _ in place}
        if len(place) < 2 or (self.nvlink_domains and len(domains) == 1):
            return ()
        switches = sorted({node // shape.nodes for node, _ in place})
        leaves = len(switches) > 1 or (self.rails and not on_rails)
        above = [("switch", switch) for switch in switches] if leaves else []
        return (*((("node", node) for node, _ in place) if self.shared_nics else ()), *above)

    def capacity(self, link: Link, shape: Shape) -> float:
        """Returns how many jobs a link carries at their full rate, which is that of a node."""
        return 1.0 if link[0] == "node" else shape.nodes / self.oversubscription

    def paces(self, jobs: Sequence[Progress], shape: Shape) -> dict[int, float]:
        """Returns for jobs by number how fast they go on, against alone; those that share no full link go at 1."""
        links = {job.number: self.links(job.place, shape, job.on_rails) for job in jobs if job.job.traffic is not None}
        users: dict[Link, list[int]] = {}
        for number, own in links.items():
            for link in own:
                users.setdefault(link, []).append(number)
        full = {link: each for link, each in users.items() if len(each) > self.capacity(link, shape)}
        traffic = {job.number: job.job.traffic for job in jobs if job.job.traffic is not None}
        found: dict[int, float] = {}
        for group in _groups(full.values()):
            own_links = sorted({link for number in group for link in links[number] if link in full})
            routes = tuple(tuple(own_links.index(link) for link in links[number] if link in full) for number in group)
            capacities = tuple(self.capacity(link, shape) for link in own_links)
            steps = tuple(traffic[number] for number in group)
            found |= dict(zip(group, paces_together(steps, routes, capacities, self.shifts), strict=True))
        return found


def _groups(users: Iterable[Sequence[int]]) -> list[list[int]]:
    """Returns the jobs that are joined by common links, each group in order."""
    groups: list[set[int]] = []
    for each in users:
        joined = set(each).union(*(group for group in groups if not group.isdisjoint(each)))
        groups = [group for group in groups if group.isdisjoint(each)] + [joined]
    return sorted(sorted(group) for group in groups)


@lru_cache(maxsize=4096)
def paces_together(
    steps: tuple[Traffic, ...], routes: tuple[tuple[int, ...], ...], capacities: tuple[float, ...], shifts: bool
) -> tuple[float, ...]:
    """Returns how fast each job goes on beside the others, against alone.

    Args:
        routes: numbers of the links that each job uses.
        capacities: of each link, in jobs at their full rate.
        shifts: choose when in its step each job begins, one job after the other, so that they hinder each other least;
            else all begin a step at once.
    """
    begins = [0.0] * len(steps)
    if shifts:
        for i in range(1, len(steps)):
            period_s = steps[i].compute_s + steps[i].network_s
            choices = [period_s * n / _SHIFTS for n in range(_SHIFTS)]
            begins[i] = max(
                choices, key=lambda begin: sum(_measured(steps[: i + 1], routes, capacities, [*begins[:i], begin]))
            )
    return tuple(_measured(steps, routes, capacities, begins))


def _measured(
    steps: Sequence[Traffic], routes: Sequence[Sequence[int]], capacities: Sequence[float], begins_s: Sequence[float]
) -> list[float]:
    """Runs the phases of all jobs, and returns the time of each job's steps alone over that of its whole steps here."""
    jobs = range(len(steps))
    sends = [False] * len(steps)
    left_s = [step.compute_s + begin_s for step, begin_s in zip(steps, begins_s, strict=True)]
    ends_s: list[list[float]] = [[begin_s] for begin_s in begins_s]
    until_s, now_s = _STEPS * max(step.compute_s + step.network_s for step in steps), 0.0
    for _ in range(_MOST_PHASES):
        sending = [i for i in jobs if sends[i]]
        rates = dict(zip(sending, fair_rates([routes[i] for i in sending], capacities), strict=True))
        pass_s = min(left_s[i] / rates.get(i, 1.0) for i in jobs)
        now_s += pass_s
        for i in jobs:
            left_s[i] -= pass_s * rates.get(i, 1.0)
            if left_s[i] <= _NOTHING * until_s:
                if sends[i]:
                    ends_s[i].append(now_s)
                sends[i] = not sends[i]
                left_s[i] += steps[i].network_s if sends[i] else steps[i].compute_s
        if now_s >= until_s and min(len(ends) for ends in ends_s) > 1:
            break
    return [
        min(1.0, (step.compute_s + step.network_s) * (len(ends) - 1) / (ends[-1] - ends[0])) if len(ends) > 1 else 1.0
        for step, ends in zip(steps, ends_s, strict=True)
    ]


def fair_rates(routes: Sequence[Sequence[int]], capacities: Sequence[float]) -> list[float]:
    """Returns max-min fair rates of flows over links, each at most 1 (progressive filling)."""
    rates, growing = [0.0] * len(routes), set(range(len(routes)))
    left = list(capacities)
    while growing:
        users = [sum(link in routes[i] for i in growing) for link in range(len(left))]
        more = min((room / using for room, using in zip(left, users, strict=True) if using), default=inf)
        more = min(more, *(1.0 - rates[i] for i in growing))
        for i in growing:
            rates[i] += more
        left = [room - more * using for room, using in zip(left, users, strict=True)]
        full = {link for link, room in enumerate(left) if room <= _NOTHING * capacities[link]}
        growing = {i for i in growing if rates[i] < 1.0 - _NOTHING and full.isdisjoint(routes[i])}
    return rates
