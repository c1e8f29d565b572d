"""Defines the keys of a file that describes a cluster of unlike GPUs and its jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.jobs.contention import SharedNetwork
from forerun.answers.jobs.elastic import ELASTIC_OF_KINDS
from forerun.answers.jobs.elastic_description import (
    ElasticEntry,
    PlannedEntry,
    PlannedSteps,
    scaling_of,
    traffic_of,
)
from forerun.answers.jobs.elastic_rounds import share_out_kinds
from forerun.answers.jobs.entries import Count, FailuresEntry, Moment, NotNegative, PlanEntry, Positive
from forerun.answers.jobs.interior_point import Vector
from forerun.answers.jobs.job import Scaling, Scheduled, Traffic
from forerun.answers.jobs.rounds import in_rounds
from forerun.answers.jobs.share_policies import SHARES
from forerun.answers.jobs.shares import Group
from forerun.answers.jobs.simulation import Terms
from forerun.answers.jobs.unlike_gpus import Beside, SteppedJob, read_rates, read_stepped_jobs
from forerun.answers.jobs.unlike_nodes import COUNT, COUNTED, NodesOfKinds
from forerun.common.errors import ForerunError, UnknownName, at
from forerun.common.yaml_files import Entry, check
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.complete import complete_plan

UNLIKE = "gpu_kinds"
"""the key that says that a cluster has unlike GPUs"""


class SteppedEntry(Entry):
    """One job with the steps a second that it makes on the kinds of GPUs that it can run on, or with its plan."""

    name: str
    gpus: Count
    submit_s: Moment = 0.0
    steps: Count | None = None
    steps_per_s: dict[str, Positive] = Field(default_factory=dict)
    network_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    plan: PlanEntry | None = None
    weight: Positive = 1.0
    group: str = ""
    elastic: dict[str, ElasticEntry] = Field(default_factory=dict)
    """how it scales on kinds of GPUs; on others it runs on `gpus` only"""


class UnlikeNetworkEntry(Entry):
    """Links that jobs share; those whose step is known slow each other there."""

    oversubscription: Positive = 1.0
    shared_nics: bool = False
    shifts: bool = False
    rails: bool = False


class PairEntry(Entry):
    """Two jobs that can run on the same GPUs, with the steps a second that each then makes on the kinds of GPUs."""

    jobs: Annotated[list[str], Field(min_length=2, max_length=2)]
    steps_per_s: dict[str, Annotated[list[NotNegative], Field(min_length=2, max_length=2)]]


class GroupEntry(Entry):
    """States the due part of a group of jobs under policies that share by group."""

    weight: Positive = 1.0
    in_order: bool = False
    """whether its jobs get their parts one after the other, in order of arrival"""


class UnlikeEntry(Entry):
    """The whole file."""

    page = "docs/jobs.md"

    name: str = "cluster"
    gpu_kinds: Annotated[dict[str, Count], Field(min_length=1)]
    gpus_per_node: Count = 8
    nodes_per_switch: Count | None = None
    placement: str = COUNT
    resume_s: NotNegative = 0.0
    failures: FailuresEntry | None = None
    network: UnlikeNetworkEntry | None = None
    clusters: dict[str, str] = Field(default_factory=dict)
    """for jobs with a plan: the cluster (forerun clusters) that each kind of GPU is"""
    trace: str | None = None
    throughputs: str | None = None
    jobs: list[SteppedEntry] = Field(default_factory=list)
    pairs: list[PairEntry] = Field(default_factory=list)
    groups: dict[str, GroupEntry] = Field(default_factory=dict)
    policies: list[str] = Field(default_factory=lambda: ["fifo-perf", "max-min-fairness-perf"], min_length=1)


@dataclass(frozen=True)
class UnlikeRequest:
    """A cluster of unlike GPUs, its jobs, and the policies to compare."""

    name: str
    workers: dict[str, int]
    jobs: tuple[SteppedJob, ...]
    policies: tuple[str, ...]
    nodes: NodesOfKinds = COUNTED
    beside: Beside = field(default_factory=dict)
    """how fast jobs are that share GPUs"""
    resume_s: float = 0.0
    groups: Mapping[str, Group] = field(default_factory=dict)
    """what groups of jobs are due; one that is not there has weight 1"""
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """Returns the GPUs of the cluster."""
        return sum(self.workers.values())

    @property
    def kinds(self) -> tuple[str, ...]:
        """Returns the kinds of GPUs."""
        return tuple(self.workers)

    @property
    def cluster_words(self) -> str:
        """Returns the cluster in words."""
        return " + ".join(f"{number:,} {kind}" for kind, number in self.workers.items())

    @property
    def placement(self) -> str:
        """Returns the rule of placement: jobs run on one kind of GPU at a time, and are placed anew in each round."""
        return "in rounds" if self.nodes.placement == COUNT else f"{self.nodes.placement}, in rounds"

    def schedule(self, policy: str) -> list[Scheduled]:
        """Returns what becomes of the jobs under a policy. Raises as `in_rounds` and `share_out_kinds` do."""
        workers, how = tuple(self.workers.values()), self.nodes
        if policy in ELASTIC_OF_KINDS:
            terms = Terms(resume_s=self.resume_s, failures=how.failures, network=how.network)
            return share_out_kinds([job.elastic for job in self.jobs], how.shapes(workers), policy, terms)
        return in_rounds(self.jobs, workers, policy, how, self.beside, self.resume_s, self.groups)


def check_policies(names: Sequence[str]) -> None:
    """Raises UnknownName for a policy that there is not for unlike GPUs."""
    for name in names:
        if name not in SHARES and name not in ELASTIC_OF_KINDS:
            raise UnknownName("policy for unlike GPUs", name, [*SHARES, *ELASTIC_OF_KINDS])


def unlike_cluster_of(data: dict[str, Any], place: str, folder: Path = Path()) -> UnlikeRequest:
    """Reads a cluster of unlike GPUs and its jobs from `data`. Paths are relative to `folder`.

    Raises ForerunError, which names the place and the key, where it says something wrong.
    """
    entry = check(UnlikeEntry, data, place)
    check_policies(entry.policies)
    kinds = tuple(entry.gpu_kinds)
    if (entry.trace is None) == (not entry.jobs):
        raise ForerunError(f"{place}: give either trace (a file of Gavel's) with throughputs, or jobs (a list)")
    if entry.trace is not None:
        if entry.throughputs is None:
            raise ForerunError(f"{place}: trace needs throughputs, a JSON file of steps a second by GPU and job type")
        if entry.pairs:
            raise ForerunError(f"{place}: pairs are for a list of jobs; throughputs say how fast jobs of a trace are")
        rates, beside = read_rates(folder / entry.throughputs, kinds)
        jobs = read_stepped_jobs(folder / entry.trace, kinds, rates)
    else:
        jobs = tuple(_job(each, kinds, entry.clusters, place) for each in entry.jobs)
        beside = _beside(entry.pairs, jobs, kinds, place)
    failures = None if entry.failures is None else entry.failures.of_nodes
    network = None if entry.network is None else SharedNetwork(**entry.network.model_dump())
    nodes = NodesOfKinds(entry.gpus_per_node, entry.placement, failures, network, entry.nodes_per_switch)
    with at(place):
        nodes.check(tuple(entry.gpu_kinds.values()), kinds)
    policies = tuple(dict.fromkeys(entry.policies))
    known = {job.group for job in jobs}
    for name in entry.groups:
        if name not in known:
            raise ForerunError(f"{place}: groups: no job is of group {name}; known: {', '.join(sorted(known - {''}))}")
    groups = {name: Group(each.weight, each.in_order) for name, each in entry.groups.items()}
    workers = dict(entry.gpu_kinds)
    return UnlikeRequest(entry.name, workers, jobs, policies, nodes, beside, entry.resume_s, groups)


def _beside(pairs: list[PairEntry], jobs: tuple[SteppedJob, ...], kinds: tuple[str, ...], place: str) -> Beside:
    """Returns the speeds of the two jobs of each pair beside each other, in either order.

    Raises ForerunError for a pair that makes no sense.
    """
    known = {job.name: job for job in jobs}
    found: dict[tuple[str, str, int], Vector] = {}
    for entry in pairs:
        at_pair = f"{place}: pair {' and '.join(entry.jobs)}"
        for name in entry.jobs:
            if name not in known:
                raise ForerunError(f"{at_pair}: there is no job {name}")
        one, other = (known[name] for name in entry.jobs)
        if one.gpus != other.gpus:
            raise ForerunError(f"{at_pair}: jobs that share GPUs need as many; these need {one.gpus} and {other.gpus}")
        rates = np.zeros((2, len(kinds)))
        for kind, both in entry.steps_per_s.items():
            if kind not in kinds:
                raise ForerunError(f"{at_pair}: steps_per_s: no GPU kind {kind}; known: {', '.join(kinds)}")
            rates[:, kinds.index(kind)] = both
        found[one.name, other.name, one.gpus], found[other.name, one.name, one.gpus] = rates, rates[::-1]
    return found


def _job(entry: SteppedEntry, kinds: tuple[str, ...], clusters: dict[str, str], place: str) -> SteppedJob:
    at_job = f"{place}: job {entry.name}"
    rates, steps = entry.steps_per_s, entry.steps
    if entry.plan is not None:
        if rates or steps is not None or entry.network_share:
            raise ForerunError(
                f"{at_job}: steps and their speed follow from the plan; leave steps_per_s and network_share out"
            )
        predicted = _predicted(entry.plan, entry.gpus, kinds, clusters, at_job)
        rates, steps = {kind: 1.0 / found.step_time_s for kind, found in predicted.items()}, entry.plan.steps
        traffic = {kind: traffic_of(found, entry.gpus) for kind, found in predicted.items()}
    else:
        share = entry.network_share
        traffic = {kind: Traffic((1.0 - share) / rate, share / rate) for kind, rate in rates.items() if share}
    if not rates or steps is None:
        raise ForerunError(f"{at_job}: give steps and steps_per_s by GPU kind, or a plan")
    for kind in rates:
        if kind not in kinds:
            raise ForerunError(f"{at_job}: steps_per_s: no GPU kind {kind}; known: {', '.join(kinds)}")
    known = tuple(rates.get(kind, 0.0) for kind in kinds)
    sends = tuple(traffic.get(kind) for kind in kinds) if any(traffic.values()) else ()
    scalings = _scalings(entry, rates, kinds, clusters, at_job)
    return SteppedJob(
        entry.name, entry.gpus, entry.submit_s, steps, known, entry.weight, entry.group, entry.name, sends, scalings
    )


def _scalings(
    entry: SteppedEntry, rates: dict[str, float], kinds: tuple[str, ...], clusters: dict[str, str], place: str
) -> tuple[Scaling | None, ...]:
    """Returns how an elastic job scales on each kind of GPU, in steps a second; empty for one that isn't elastic."""
    found: dict[str, Scaling] = {}
    for kind, elastic in entry.elastic.items():
        at_kind = f"{place}: elastic: {kind}"
        if kind not in kinds:
            raise ForerunError(f"{place}: elastic: no GPU kind {kind}; known: {', '.join(kinds)}")
        if entry.plan is not None:
            planned = PlannedSteps(PlannedEntry(**entry.plan.model_dump(), cluster=clusters[kind]))
            own = planned.scaling(elastic, entry.gpus, at_kind)
            usual = planned.predicted(entry.gpus, entry.plan.global_batch)
            found[kind] = _at_rate(own, 1.0 / usual.step_time_s, 0.0, (0 if usual.fits else entry.gpus))
        elif kind not in rates:
            raise ForerunError(f"{at_kind}: steps_per_s has no entry for {kind}, on the {entry.gpus:,} GPUs of the job")
        else:
            found[kind] = _at_rate(scaling_of(elastic, entry.gpus, at_kind), rates[kind], entry.network_share)
    return tuple(found.get(kind) for kind in kinds) if found else ()


def _at_rate(own: Scaling, rate: float, network_share: float, without: int = 0) -> Scaling:
    """Returns a scaling whose speeds are steps a second, given those at speed 1, without one of its sizes."""
    kept = [i for i, size in enumerate(own.sizes) if size != without]
    rates = [own.speeds[i] * rate for i in kept]
    steps: tuple[Traffic | None, ...] = tuple(own.steps[i] for i in kept) if own.steps else ()
    if network_share:
        steps = tuple(Traffic((1.0 - network_share) / each, network_share / each) for each in rates)
    return Scaling(tuple(own.sizes[i] for i in kept), tuple(rates), steps)


def _predicted(
    entry: PlanEntry, gpus: int, kinds: tuple[str, ...], clusters: dict[str, str], place: str
) -> dict[str, Prediction]:
    """Returns the prediction of a plan for each kind of GPU on which the plan runs and fits in memory.

    Raises ForerunError for a kind without a cluster, or where the plan runs on none.
    """
    found: dict[str, Prediction] = {}
    reasons = []
    model, plan = load_model(entry.model), complete_plan(entry.fields, gpus, entry.global_batch)
    for kind in kinds:
        if kind not in clusters:
            raise ForerunError(f"{place}: clusters has no entry for GPU kind {kind}; add one")
        prediction = predict(model, plan, load_cluster(clusters[kind]))
        if prediction.fits:
            found[kind] = prediction
        else:
            reasons.append(f"needs {prediction.peak_reserved_gib:.1f} GiB on {kind}")
    if not found:
        raise ForerunError(f"{place}: the plan fits on no kind of GPU: {'; '.join(reasons)}")
    return found
