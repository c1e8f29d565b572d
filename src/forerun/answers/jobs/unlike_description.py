"""The keys of a file that describes a cluster of unlike GPUs and its jobs, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from forerun.answers.jobs.job import Scheduled
from forerun.answers.jobs.rounds import in_rounds
from forerun.answers.jobs.shares import shares
from forerun.answers.jobs.unlike_gpus import SteppedJob, read_rates, read_stepped_jobs
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import Entry, check

UNLIKE = "gpu_kinds"
"""the key that says that a cluster has unlike GPUs"""
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class SteppedEntry(Entry):
    """One job with the steps a second that it makes on the kinds of GPUs that it can run on."""

    name: str
    gpus: Count
    submit_s: NotNegative = 0.0
    steps: Count
    steps_per_s: Annotated[dict[str, Positive], Field(min_length=1)]
    weight: Positive = 1.0
    group: str = ""


class UnlikeEntry(Entry):
    """The whole file."""

    page = "docs/jobs.md"

    name: str = "cluster"
    gpu_kinds: Annotated[dict[str, Count], Field(min_length=1)]
    trace: str | None = None
    throughputs: str | None = None
    jobs: list[SteppedEntry] = Field(default_factory=list)
    policies: list[str] = Field(default_factory=lambda: ["fifo-perf", "max-min-fairness-perf"])


@dataclass(frozen=True)
class UnlikeRequest:
    """A cluster of unlike GPUs, its jobs, and the policies to compare."""

    name: str
    workers: dict[str, int]
    jobs: tuple[SteppedJob, ...]
    policies: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return sum(self.workers.values())

    @property
    def cluster_words(self) -> str:
        """Returns the cluster in words."""
        return " + ".join(f"{number:,} {kind}" for kind, number in self.workers.items())

    @property
    def placement(self) -> str:
        """Jobs run on one kind of GPU at a time."""
        return "in rounds"

    def schedule(self, policy: str) -> list[Scheduled]:
        """Returns what becomes of the jobs under a policy. Raises as `in_rounds` does."""
        return in_rounds(self.jobs, tuple(self.workers.values()), policy)


def unlike_cluster_of(data: dict[str, Any], place: str, folder: Path = Path()) -> UnlikeRequest:
    """Returns what `data` describes; files that it names lie in `folder`.

    Raises ForerunError, which names the place and the key, where it says something wrong.
    """
    entry = check(UnlikeEntry, data, place)
    for name in entry.policies:
        shares(name)
    kinds = tuple(entry.gpu_kinds)
    if (entry.trace is None) == (not entry.jobs):
        raise ForerunError(f"{place}: give either trace (a file of Gavel's) with throughputs, or jobs (a list)")
    if entry.trace is not None:
        if entry.throughputs is None:
            raise ForerunError(f"{place}: trace needs throughputs, a JSON file of steps a second by GPU and job type")
        jobs = read_stepped_jobs(folder / entry.trace, kinds, read_rates(folder / entry.throughputs, kinds))
    else:
        jobs = tuple(_job(each, kinds, place) for each in entry.jobs)
    return UnlikeRequest(entry.name, dict(entry.gpu_kinds), jobs, tuple(dict.fromkeys(entry.policies)))


def _job(entry: SteppedEntry, kinds: tuple[str, ...], place: str) -> SteppedJob:
    for kind in entry.steps_per_s:
        if kind not in kinds:
            raise ForerunError(f"{place}: job {entry.name}: steps_per_s: no GPU kind {kind}; known: {', '.join(kinds)}")
    rates = tuple(entry.steps_per_s.get(kind, 0.0) for kind in kinds)
    return SteppedJob(entry.name, entry.gpus, entry.submit_s, entry.steps, rates, entry.weight, entry.group)
