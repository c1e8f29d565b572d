"""Defines the keys of a file that describes a cluster and its jobs. The names of the keys contain their units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from forerun.answers.jobs.contention import SharedNetwork
from forerun.answers.jobs.elastic import ELASTIC
from forerun.answers.jobs.elastic_description import ElasticEntry, PlannedEntry, PlannedSteps, scaling_of
from forerun.answers.jobs.elastic_rounds import share_out
from forerun.answers.jobs.entries import Count, FailuresEntry, Moment, NotNegative, Positive
from forerun.answers.jobs.job import Job, Scheduled, Traffic
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.placers import PLACERS
from forerun.answers.jobs.policies import POLICIES
from forerun.answers.jobs.schedule import schedule
from forerun.answers.jobs.simulation import USUAL, Terms
from forerun.answers.jobs.trace_file import read_jobs
from forerun.answers.jobs.unlike_description import UNLIKE, UnlikeRequest, unlike_cluster_of
from forerun.common.errors import ForerunError, UnknownName, at
from forerun.common.yaml_files import Entry, check, read_yaml
from forerun.core.network.on_topology import check_size, load_network

_MOST_JOBS = 1_000_000
_MOST_GPUS = 1_000_000


class JobEntry(Entry):
    """One job; it takes duration_s, or as long as its plan says."""

    name: str
    gpus: Count
    submit_s: Moment = 0.0
    duration_s: Positive | None = None
    plan: PlannedEntry | None = None
    step_s: Positive | None = None
    network_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    group: str = ""
    priority: int = 0
    elastic: ElasticEntry | None = None


class DrawnEntry(Entry):
    """Jobs drawn at random: exponential gaps, log-normal durations, GPUs by weight."""

    number: Count
    per_hour: Positive
    median_s: Positive
    sigma: NotNegative = 1.5
    gpus: dict[int, Positive]
    seed: int = 0


class NetworkEntry(Entry):
    """Links that jobs share; those whose step is known slow each other there."""

    oversubscription: Positive = 1.0
    shared_nics: bool = False
    shifts: bool = False
    rails: bool = False
    nvlink_domains: bool = False
    topology: str | None = None


class ClusterEntry(Entry):
    """The whole file."""

    page = "docs/jobs.md"

    name: str = "cluster"
    switches: Count = 1
    nodes: Count
    gpus_per_node: Count = 8
    nodes_per_domain: Count = 1
    trace: str | None = None
    jobs: list[JobEntry] = Field(default_factory=list)
    drawn: DrawnEntry | None = None
    policies: list[str] = Field(default_factory=lambda: ["fifo", "easy", "srtf"], min_length=1)
    placement: str = "packed"
    resume_s: NotNegative = 0.0
    failures: FailuresEntry | None = None
    quotas: dict[str, Count] = Field(default_factory=dict)
    network: NetworkEntry | None = None


@dataclass(frozen=True)
class JobsRequest:
    """A cluster of equal nodes, its jobs, and the policies to compare."""

    name: str
    shape: Shape
    jobs: tuple[Job, ...]
    policies: tuple[str, ...]
    placement: str
    terms: Terms = USUAL
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """Returns the GPUs of the cluster."""
        return self.shape.total

    @property
    def kinds(self) -> tuple[str, ...]:
        """Returns no kinds: all GPUs are equal."""
        return ()

    @property
    def cluster_words(self) -> str:
        """Returns the cluster in words."""
        return f"{self.gpus:,} GPUs in {self.shape.switches * self.shape.nodes:,} nodes"

    def schedule(self, policy: str) -> list[Scheduled]:
        """Returns the schedule of the jobs under a policy. Raises as `schedule` does."""
        if policy in ELASTIC:
            return share_out(self.jobs, self.shape, policy, self.terms)
        return schedule(self.jobs, self.shape, policy, self.placement, self.terms)


def of_trace(path: str | Path, shape: Shape) -> JobsRequest:
    """Returns the jobs of a CSV file on a cluster, with the usual policies. Raises as `read_jobs` does."""
    jobs, notes = _traced(path)
    usual = ClusterEntry(nodes=shape.nodes)
    return JobsRequest(Path(path).stem, shape, jobs, tuple(usual.policies), usual.placement, notes=notes)


def check_names(policies: Sequence[str], placement: str) -> None:
    """Raises UnknownName for a policy or a placement that there is not."""
    for name in policies:
        if name not in POLICIES and name not in ELASTIC:
            raise UnknownName("scheduling policy", name, [*POLICIES, *ELASTIC])
    if placement not in PLACERS:
        raise UnknownName("placement", placement, list(PLACERS))


def read_cluster(path: str | Path) -> JobsRequest | UnlikeRequest:
    """Reads a cluster and its jobs from a YAML or JSON file. The path of a trace is relative to the file.

    Raises ForerunError, which names the file and the key, for a file that can't be read or says something wrong.
    """
    data = read_yaml(path)
    if UNLIKE in data:
        return unlike_cluster_of(data, str(path), Path(path).parent)
    return cluster_of(data, str(path), Path(path).parent)


def cluster_of(data: dict[str, Any], place: str, folder: Path = Path()) -> JobsRequest:
    """Reads a cluster and its jobs from `data`, as `read_cluster` does from the contents of a file."""
    entry = check(ClusterEntry, data, place)
    given = [name for name in ("trace", "jobs", "drawn") if getattr(entry, name)]
    if len(given) != 1:
        raise ForerunError(f"{place}: give one of trace (a CSV file), jobs (a list) and drawn (distributions)")
    check_names(entry.policies, entry.placement)
    notes: tuple[str, ...] = ()
    if entry.trace is not None:
        jobs, notes = _traced(folder / entry.trace)
    elif entry.drawn is not None:
        jobs = _drawn(entry.drawn, place)
    else:
        jobs = tuple(_job(each, place) for each in entry.jobs)
    with at(place):
        shape = Shape(entry.switches, entry.nodes, entry.gpus_per_node, entry.nodes_per_domain)
    if shape.total > _MOST_GPUS:
        raise ForerunError(f"{place}: {shape.total:,} GPUs; forerun schedules jobs on at most {_MOST_GPUS:,}")
    policies = tuple(dict.fromkeys(entry.policies))
    return JobsRequest(
        name=entry.name,
        shape=shape,
        jobs=jobs,
        policies=policies,
        placement=entry.placement,
        terms=Terms(
            resume_s=entry.resume_s,
            failures=None if entry.failures is None else entry.failures.of_nodes,
            quotas=entry.quotas,
            network=None if entry.network is None else _network(entry.network, shape, folder, f"{place}: network"),
        ),
        notes=notes,
    )


def _network(entry: NetworkEntry, shape: Shape, folder: Path, place: str) -> SharedNetwork:
    given = entry.model_dump(exclude={"topology"})
    if entry.topology is None:
        return SharedNetwork(**given)
    for name in entry.model_fields_set - {"topology", "shifts"}:
        raise ForerunError(f"{place}: {name} is about links of nodes and switches; leave it out beside a topology")
    with at(place):
        is_file = (folder / entry.topology).suffix.lower() in (".yaml", ".yml", ".json")
        network = load_network(folder / entry.topology if is_file else entry.topology)
        check_size(network, shape.total)
    return SharedNetwork(**given, topology=network)


def _traced(path: str | Path) -> tuple[tuple[Job, ...], tuple[str, ...]]:
    trace = read_jobs(path)
    notes: list[str] = []
    if trace.left_out:
        rows = "1 row" if trace.left_out == 1 else f"{trace.left_out:,} rows"
        notes.append(f"Left out: {rows} without a GPU or a duration.")
    if trace.shares:
        ask = "1 job asks" if trace.shares == 1 else f"{trace.shares:,} jobs ask"
        notes.append(f"GPUs are not shared: {ask} for a share of a GPU (gpu_milli), and each such job has a whole one.")
    return trace.jobs, tuple(notes)


def _job(entry: JobEntry, place: str) -> Job:
    if (entry.duration_s is None) == (entry.plan is None):
        raise ForerunError(f"{place}: job {entry.name}: give either duration_s or plan")
    if entry.network_share and entry.step_s is None:
        raise ForerunError(f"{place}: job {entry.name}: network_share needs step_s")
    scaling = None
    if entry.plan is None:
        assert entry.duration_s is not None
        duration_s, step_s, share = entry.duration_s, entry.step_s or 0.0, entry.network_share
        if entry.elastic is not None:
            scaling = scaling_of(entry.elastic, entry.gpus, f"{place}: job {entry.name}: elastic")
        traffic = Traffic((1.0 - share) * step_s, share * step_s) if share else None
    else:
        planned = PlannedSteps(entry.plan)
        with at(f"{place}: job {entry.name}"):
            duration_s = entry.plan.steps * planned.predicted(entry.gpus, entry.plan.global_batch).step_time_s
            traffic = planned.traffic(entry.gpus, entry.plan.global_batch)
        if entry.elastic is not None:
            scaling = planned.scaling(entry.elastic, entry.gpus, f"{place}: job {entry.name}: elastic")
    return Job(entry.name, entry.gpus, entry.submit_s, duration_s, entry.group, entry.priority, traffic, scaling)


def _drawn(entry: DrawnEntry, place: str) -> tuple[Job, ...]:
    if entry.number > _MOST_JOBS:
        raise ForerunError(f"{place}: drawn: number {entry.number:,} is more than {_MOST_JOBS:,}")
    if not entry.gpus or min(entry.gpus) < 1:
        raise ForerunError(
            f"{place}: drawn: gpus needs numbers of at least 1 with their weights, such as {{1: 0.7, 8: 0.3}}"
        )
    random = np.random.default_rng(entry.seed)
    submitted = np.cumsum(random.exponential(3_600.0 / entry.per_hour, entry.number))
    durations = entry.median_s * np.exp(entry.sigma * random.standard_normal(entry.number))
    weights = np.array(list(entry.gpus.values()))
    gpus = random.choice(np.array(list(entry.gpus)), entry.number, p=weights / weights.sum())
    rows = zip(gpus.tolist(), submitted.tolist(), durations.tolist(), strict=True)
    return tuple(Job(f"job {i}", *row) for i, row in enumerate(rows))
