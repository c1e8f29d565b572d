"""Job: a gang of GPUs for a known time; Progress: how far it is in a simulation. Times are seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal

from forerun.common.errors import ForerunError

MOST_S = 100 * 365.25 * 86_400.0
"""seconds of the longest job that is simulated; failures never let much longer ones end"""
Placement = tuple[tuple[int, int], ...]
"""(node, GPUs on it) of a running job; empty if GPUs are only counted"""


Pattern = Literal["ring", "hops", "direct"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Communication of one kind of group of a job, in all its groups at once."""

    seconds: float
    pattern: Pattern = "ring"
    """hops: each member sends to its neighbours; direct: each sends a share to every other one"""
    size: int = 0
    """GPUs of a group; 0: all GPUs of the job"""
    inner: int = 1
    """distance between neighbours of a group, in ranks"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A step of a job that has the network to itself: it computes, then communicates."""

    compute_s: float
    network_s: float
    exchanges: tuple[Exchange, ...] = ()
    """the exchanges of its communication, one after the other; empty: rings through all its GPUs"""

    @property
    def parts(self) -> tuple[Exchange, ...]:
        """Returns the exchanges of the job's communication."""
        return self.exchanges or (Exchange(self.network_s),)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Tells how fast a job goes on other GPUs than those that it asks for. Each element of a tuple is an option."""

    sizes: tuple[int, ...]
    """numbers of GPUs that it can run on, ascending on each kind"""
    speeds: tuple[float, ...]
    """progress on each, over that on the GPUs that the job asks for"""
    steps: tuple[Traffic | None, ...] = ()
    """its step on each, where other jobs on the same links slow it"""
    kinds: tuple[int, ...] = ()
    """the kind of GPU of each, ascending; empty: all GPUs are equal"""

    @property
    def kind_of_sizes(self) -> tuple[int, ...]:
        """Returns the kind of GPU of each option."""
        return self.kinds or (0,) * len(self.sizes)

    @property
    def least_gpus(self) -> float:
        """Returns the GPU-seconds, over its seconds at speed 1, of the size that needs the fewest."""
        return min(size / speed for size, speed in zip(self.sizes, self.speeds, strict=True))


@dataclass(frozen=True, slots=True)
class Job:
    """A job that takes `duration_s` on all its GPUs at once."""

    name: str
    gpus: int
    submit_s: float
    duration_s: float
    group: str = ""
    """virtual cluster or team, for fair shares"""
    priority: int = 0
    """the larger goes first under policies that ask for it"""
    traffic: Traffic | None = None
    """its step, where other jobs on the same links slow it"""
    scaling: Scaling | None = None
    """None: it runs on `gpus` only"""
    weight: float = 1.0
    """how much its goodput counts under policies of elastic jobs that weigh them"""

    def __post_init__(self) -> None:
        check_duration(self.name, self.duration_s)


def check_duration(name: str, duration_s: float) -> None:
    """Raises ForerunError for a job that lasts longer than a simulation covers."""
    if not 0 < duration_s <= MOST_S:
        raise ForerunError(f"job {name} lasts {duration_s:g} s; jobs last up to 100 years")


class Progress:
    """A job in a simulation.

    `since_s` is when it last started, and None while it waits. Since `seen_s`, when it had run for `ran_s`, it goes on
    at `pace`, which is 1 if no other job slows it. `on_rails` says whether it has the same GPUs of each
    of its nodes.
    """

    __slots__ = (
        *("end_s", "failures", "gpus", "job", "number", "pace", "place", "preemptions"),
        *("on_rails", "ran_s", "seen_s", "since_s", "start_s", "version"),
    )

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number, self.gpus = job, number, job.gpus
        self.since_s: float | None = None
        self.ran_s, self.seen_s, self.pace = 0.0, 0.0, 1.0
        self.start_s, self.end_s = inf, inf
        self.preemptions = self.failures = 0
        self.place: Placement = ()
        self.on_rails = True
        self.version = 0

    @property
    def traffic(self) -> Traffic | None:
        """Returns its step; None if it sends nothing that is known."""
        return self.job.traffic

    def done_s(self, now_s: float) -> float:
        """Returns the seconds that it has run by now, as if nothing had slowed it."""
        return self.ran_s if self.since_s is None else self.ran_s + self.pace * max(0.0, now_s - self.seen_s)

    def remaining_s(self, now_s: float) -> float:
        """Returns the seconds that it still has to run."""
        return self.job.duration_s - self.done_s(now_s)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A job with the times at which it ran."""

    job: Job
    start_s: float
    end_s: float
    preemptions: int
    ran: tuple[tuple[float, float], ...]
    """(begin, end) of each time that it ran"""
    failures: int = 0
    """how often a node under it failed"""
    held: tuple[float, ...] = ()
    """GPUs that it had each time that it ran (half of them if two jobs share them); empty: always the requested ones"""
    kinds: tuple[int, ...] = ()
    """the kind of GPU that it had each time that it ran; empty: all GPUs are equal"""

    @property
    def periods(self) -> Iterator[tuple[float, float, float]]:
        """Yields (begin, end, GPUs) of each time that it ran."""
        for i, (begin_s, end_s) in enumerate(self.ran):
            yield begin_s, end_s, self.held[i] if self.held else self.job.gpus

    @property
    def held_gpu_s(self) -> float:
        """Returns the GPU-seconds that it had."""
        return sum(gpus * (end_s - begin_s) for begin_s, end_s, gpus in self.periods)

    @property
    def needed_gpu_s(self) -> float:
        """Returns the GPU-seconds that it needs where nothing slows it, on the GPUs with the least of them."""
        scaling = self.job.scaling
        return self.job.duration_s * (self.job.gpus if scaling is None or not self.held else scaling.least_gpus)

    @property
    def jct_s(self) -> float:
        """Returns the job completion time: seconds from submission to end."""
        return self.end_s - self.job.submit_s

    @property
    def ran_s(self) -> float:
        """Returns the seconds in which it had GPUs."""
        return sum(end - begin for begin, end in self.ran)

    @property
    def waited_s(self) -> float:
        """Returns the seconds in which it had no GPUs."""
        return self.jct_s - self.ran_s
