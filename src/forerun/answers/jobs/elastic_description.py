"""The keys of a job that may run on several numbers of GPUs, and of one that is given as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.jobs.elastic import efficiency, step_s
from forerun.answers.jobs.entries import Count, NotNegative, PlanEntry, Positive
from forerun.answers.jobs.job import Exchange, Pattern, Scaling, Traffic
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import Entry
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.complete import complete_plan
from forerun.sources.symbolic.mesh import groups_of


class PlannedEntry(PlanEntry):
    """A job given as a plan on one cluster."""

    cluster: str


class ElasticEntry(Entry):
    """Describes how the job scales: by a table of goodput, by Pollux's model of a step, or by its plan on each of
    `sizes`.
    """

    goodput: dict[Count, Positive] = Field(default_factory=dict)
    sizes: list[Count] = Field(default_factory=list)
    example_s: Positive | None = None
    sync_s: dict[Count, NotNegative] = Field(default_factory=dict)
    overlap: Annotated[float, Field(ge=1)] = 1.0
    batch: Count | None = None
    largest_batch: Count | None = None
    noise_scale: NotNegative | None = None


_EXPOSED: dict[str, tuple[str, Pattern]] = {
    "exposed_data_parallel": ("dp_all", "ring"),
    "exposed_tensor_parallel": ("tp", "ring"),
    "exposed_context_parallel": ("cp", "ring"),
    "exposed_expert_parallel": ("ep", "direct"),
    "exposed_pipeline_transfer": ("pp", "hops"),
}
"""part of a step -> the groups that communicate then, and how"""


def traffic_of(found: Prediction, gpus: int) -> Traffic | None:
    """Returns the traffic of a predicted step. The step computes first. Then each kind of its groups communicates for
    its exposed time. Returns None if no communication is exposed.
    """
    groups = groups_of(found.own_plan(), gpus)
    exchanges = tuple(
        Exchange(seconds, pattern, group.size, group.inner) if not group.runs else Exchange(seconds, pattern)
        for cause, (axis, pattern) in _EXPOSED.items()
        if (seconds := found.breakdown.get(cause, 0.0)) > 0.0 and (group := groups[axis]).size > 1
    )
    network_s = sum(each.seconds for each in exchanges)
    return Traffic(found.step_time_s - network_s, network_s, exchanges) if exchanges else None


class PlannedSteps:
    """Predicts the step of a plan on numbers of GPUs, each at most once."""

    def __init__(self, entry: PlannedEntry) -> None:
        self.entry = entry
        self.predicted = lru_cache(maxsize=None)(self._predicted)

    def _predicted(self, gpus: int, batch: int | None) -> Prediction:
        plan = complete_plan(self.entry.fields, gpus, batch)
        return predict(load_model(self.entry.model), plan, load_cluster(self.entry.cluster))

    def traffic(self, gpus: int, batch: int | None) -> Traffic | None:
        """Returns the traffic of the plan's step on `gpus`, as `traffic_of` does."""
        return traffic_of(self.predicted(gpus, batch), gpus)

    def scaling(self, elastic: ElasticEntry, gpus: int, place: str) -> Scaling:
        """Returns the speed of the plan on each of `sizes` on which it fits in memory, at the batch with the highest
        goodput.

        Raises ForerunError for keys that don't go with a plan, or where the plan runs on none of the sizes.
        """
        first, noise = self.entry.global_batch, elastic.noise_scale
        if elastic.goodput or elastic.sync_s or elastic.example_s is not None or elastic.batch is not None:
            raise ForerunError(f"{place}: the speed follows from the plan; give only sizes, noise_scale, largest_batch")
        if not elastic.sizes or first is None:
            raise ForerunError(f"{place}: give sizes (numbers of GPUs), and global_batch in the plan")
        found: dict[int, float] = {}
        steps: dict[int, Traffic | None] = {}
        for size in sorted({*elastic.sizes, gpus}):
            rates: dict[int, float] = {}
            for batch in _batches(first, elastic.largest_batch):
                try:
                    step = self.predicted(size, batch)
                except ForerunError:
                    continue
                if size != gpus and not step.fits:
                    continue
                rates[batch] = batch / step.step_time_s * (1.0 if noise is None else efficiency(batch, first, noise))
                if noise is None:
                    break
            if rates:
                best = max(rates, key=lambda batch: rates[batch])
                found[size], steps[size] = rates[best], self.traffic(size, best)
        return _scaling(found, gpus, place, steps)


def scaling_of(elastic: ElasticEntry, gpus: int, place: str) -> Scaling:
    """Returns the scaling of a job, from its table of goodput or from Pollux's model of its step.

    Raises ForerunError if the keys say neither, or nothing for the GPUs that the job asks for.
    """
    if elastic.sizes:
        raise ForerunError(f"{place}: sizes are for a job with a plan; give goodput by number of GPUs")
    if elastic.goodput:
        return _scaling(elastic.goodput, gpus, place)
    given = (elastic.example_s, elastic.batch, elastic.noise_scale)
    if not elastic.sync_s or None in given:
        raise ForerunError(
            f"{place}: give goodput by number of GPUs, or example_s, sync_s by number of GPUs, batch and noise_scale"
        )
    example_s, first, noise = elastic.example_s or 0.0, elastic.batch or 1, elastic.noise_scale or 0.0
    return _scaling(
        {
            size: max(
                batch / step_s(batch, size, example_s, sync, elastic.overlap) * efficiency(batch, first, noise)
                for batch in _batches(first, elastic.largest_batch)
            )
            for size, sync in elastic.sync_s.items()
        },
        gpus,
        place,
    )


def _batches(first: int, largest: int | None) -> list[int]:
    """Returns the first batch and its doubles up to the largest."""
    found = [first]
    while largest is not None and 2 * found[-1] <= largest:
        found.append(2 * found[-1])
    return found


def _scaling(
    goodput: dict[int, float], gpus: int, place: str, steps: Mapping[int, Traffic | None] | None = None
) -> Scaling:
    if gpus not in goodput:
        raise ForerunError(f"{place}: has no entry for the {gpus:,} GPUs that the job asks for")
    sizes = tuple(sorted(goodput))
    speeds = tuple(goodput[size] / goodput[gpus] for size in sizes)
    return Scaling(sizes, speeds, () if steps is None else tuple(steps[size] for size in sizes))
