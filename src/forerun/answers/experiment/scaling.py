"""scale: simulates one experiment on several numbers of nodes.

Data parallelism grows with the nodes; model parallelism does not change. Weak scaling keeps the batch of each GPU.
Strong scaling keeps the global batch of the experiment: a data-parallel rank keeps its micro batch and runs fewer of
them. If its share of the batch is smaller than the micro batch, or not a multiple of it, the rank uses the largest
micro batch that divides its share. GPUs of other kinds scale in proportion, and a slow rank stays slow if it exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from forerun.answers.experiment.conditions import joined
from forerun.answers.experiment.description.read import changed
from forerun.answers.experiment.digest import digest
from forerun.answers.experiment.request import Request
from forerun.answers.experiment.result import CAUSES, Bill, ScalePoint, ScalingStudy
from forerun.answers.experiment.run import run
from forerun.answers.experiment.store import Progress, Store, points_of, workers_of
from forerun.common.errors import ForerunError
from forerun.common.workers import HERE, Workers
from forerun.describe.plan.plan import Plan

_EQUAL = 1e-9
"""relative difference below which two scales are as good"""


def scale(
    request: Request,
    nodes: Sequence[int],
    strong: bool = False,
    folder: Path | None = None,
    progress: Progress | None = None,
    workers: Workers = HERE,
) -> ScalingStudy:
    """Runs `request` on each of `nodes`. A scale that can't run is a point with the reason.

    Args:
        folder: where finished points are kept, so that a study that is broken off goes on from there.
        workers: who simulates; this process alone where the request has handlers.

    Raises ForerunError for no or senseless nodes, a request that was not read from sections, or a folder that can't be
    written.
    """
    if not nodes or min(nodes) < 1:
        raise ForerunError(f"{request.name}: expected numbers of nodes of at least 1, got {list(nodes)}")
    scales = [_scaled(request, number, strong) for number in sorted(set(nodes))]
    ready = [each for each in scales if not each.point.error]
    found = points_of(
        [digest("scale", each.request) for each in ready],
        [f"{request.name} on {each.point.num_nodes} nodes" for each in ready],
        partial(_simulated, ready),
        Store(ScalePoint, folder),
        progress,
        workers_of(request, workers),
    )
    done = {point.num_nodes: point for point in found}
    points = _with_efficiency([done.get(each.point.num_nodes, each.point) for each in scales])
    return _study(request, strong, points)


@dataclass(frozen=True)
class _Scale:
    request: Request
    """the experiment on so many nodes; where that can't be, as it is"""
    point: ScalePoint
    """the row before its simulation"""


def _scaled(request: Request, num_nodes: int, strong: bool) -> _Scale:
    point = _empty(num_nodes, num_nodes * gpus_per_node(request))
    try:
        scaled, note = request_at(request, num_nodes, strong)
    except ForerunError as error:
        return _Scale(request, replace(point, error=str(error)))
    return _Scale(scaled, replace(point, note=note))


def _simulated(scales: Sequence[_Scale], number: int) -> ScalePoint:
    each = scales[number]
    try:
        result = run(each.request)
    except ForerunError as error:
        return replace(each.point, error=str(error))
    return replace(
        each.point,
        step_time_s=result.mean_s,
        samples_per_step=each.request.setup.samples_per_step,
        samples_per_s=result.samples_per_s,
        breakdown_s=result.breakdown_s,
        peak_reserved_gib=result.peak_reserved_gib,
        fits=result.fits,
        bill=result.bill,
        note=joined(each.point.note, *result.notes),
    )


def _empty(num_nodes: int, n_gpus: int) -> ScalePoint:
    nothing = Bill(0.0, None, None, None, None, 0.0, None)
    return ScalePoint(num_nodes, n_gpus, 0.0, 0, 0.0, 0.0, dict.fromkeys(CAUSES, 0.0), 0.0, False, nothing)


def gpus_per_node(request: Request) -> int:
    """Returns the GPUs of a node. Raises ForerunError for clusters that are one node of any size."""
    cluster = request.setup.cluster
    if not cluster.node_size:
        raise ForerunError(
            f"{request.name}: cluster {cluster.name} is not made of nodes; give hardware.num_gpus_per_node"
        )
    return cluster.node_size


def request_at(request: Request, num_nodes: int, strong: bool) -> tuple[Request, str]:
    """Returns the experiment on `num_nodes` nodes, and its other changes in words.

    Raises ForerunError if the GPUs, the batch or the kinds of GPUs don't divide, or the plan can't run there; it says
    why.
    """
    if not request.given:
        raise ForerunError(
            f"{request.name}: only an experiment that was read from sections can be scaled; use Experiment.from_dict"
        )
    setup, before = request.setup, request.setup.plan
    n_gpus = num_nodes * gpus_per_node(request)
    plan = plan_at(before, n_gpus, strong)
    lost = sorted(rank for rank in request.disturbance.slow_ranks if rank >= n_gpus)
    note = f"no slow rank {', '.join(map(str, lost))} among {n_gpus} GPUs" if lost else ""
    slow = {rank: factor for rank, factor in request.disturbance.slow_ranks.items() if rank < n_gpus}
    changes: dict[str, Any] = {
        "training.num_nodes": num_nodes,
        "training.batch_size_per_gpu": plan.micro_batch,
        "training.micro_batch": None,
        "training.gradient_accumulation_steps": plan.n_microbatches,
        "training.n_microbatches": None,
        "training.dp_replicate": plan.dp_replicate,
        "training.dp_shard": plan.dp_shard,
        "training.zero_stage": plan.zero_stage,
        "training.batch_schedule": [[start, _batch_at(b, before, plan, strong)] for start, b in request.batch_schedule],
        "hardware.slow_gpus": slow,
    }
    if setup.kinds:
        changes["hardware.mixed"] = _kinds_at(request, plan, strong)
    return changed(request, changes), note


def plan_at(plan: Plan, n_gpus: int, strong: bool) -> Plan:
    """Returns `plan` on `n_gpus` GPUs: more or fewer data-parallel ranks.

    Replicas grow, or shards where the plan has no replicas; of a hybrid (both) the shards stay.

    Raises ForerunError if the GPUs or the global batch don't divide.
    """
    model_parallel = plan.cp * plan.tp * plan.pp
    dp, rest = divmod(n_gpus, model_parallel)
    if rest:
        raise ForerunError(
            f"{n_gpus} GPUs are not a multiple of the {model_parallel} GPUs of a replica (cp x tp x pp);"
            " leave this scale out"
        )
    if plan.dp_shard > 1 and plan.dp_replicate > 1:
        shard = min(plan.dp_shard, dp)
    else:
        shard = dp if plan.dp_shard > 1 or (plan.dp_replicate == 1 and plan.zero_stage) else 1
    if dp % shard:
        raise ForerunError(f"{dp} data-parallel ranks are not a multiple of dp_shard {shard}; leave this scale out")
    scaled = replace(plan, dp_replicate=dp // shard, dp_shard=shard)
    if not strong:
        return scaled
    share, rest = divmod(plan.global_batch, dp)
    if rest:
        raise ForerunError(
            f"the global batch of {plan.global_batch} is not a multiple of {dp} data-parallel ranks; scale weakly"
        )
    micro_batch = next(size for size in range(min(plan.micro_batch, share), 0, -1) if share % size == 0)
    return replace(scaled, micro_batch=micro_batch, n_microbatches=share // micro_batch)


def _batch_at(micro_batch: int, before: Plan, plan: Plan, strong: bool) -> int:
    """Returns the micro batch of a schedule's entry at another scale."""
    if not strong:
        return micro_batch
    whole = micro_batch * before.n_microbatches * before.dp
    scaled, rest = divmod(whole, plan.n_microbatches * plan.dp)
    if rest or not scaled:
        raise ForerunError(
            f"the global batch of {whole} in batch_schedule is not a multiple of {plan.dp} data-parallel ranks x"
            f" {plan.n_microbatches} micro batches; scale weakly"
        )
    return scaled


def _kinds_at(request: Request, plan: Plan, strong: bool) -> list[dict[str, Any]]:
    """Returns `hardware.mixed` at another scale: whole replicas of each kind, in proportion."""
    setup = request.setup
    ratio = Fraction(plan.world_size, setup.n_gpus)
    per_replica = plan.world_size // plan.dp
    entries = []
    for kind, entry in zip(setup.kinds, request.given["hardware"]["mixed"], strict=True):
        if strong and kind.micro_batch is not None:
            raise ForerunError(
                f"{kind.name} GPUs have a batch_size_per_gpu of their own, which changes the global batch; scale weakly"
            )
        n_gpus = kind.n_gpus * ratio
        if n_gpus % per_replica:
            raise ForerunError(
                f"{kind.n_gpus} of {setup.n_gpus} GPUs are {kind.name}: their share of {plan.world_size} GPUs is no"
                " whole number of replicas; leave this scale out"
            )
        others = {key: value for key, value in entry.items() if key not in ("num_nodes", "num_gpus")}
        entries.append(others | {"num_gpus": int(n_gpus)})
    return entries


def _with_efficiency(points: list[ScalePoint]) -> tuple[ScalePoint, ...]:
    base = next((point for point in points if not point.error), None)
    if base is None:
        return tuple(points)

    def efficiency(point: ScalePoint) -> float:
        return (point.samples_per_s / base.samples_per_s) / (point.n_gpus / base.n_gpus)

    return tuple(point if point.error else replace(point, efficiency=efficiency(point)) for point in points)


def _study(request: Request, strong: bool, points: tuple[ScalePoint, ...]) -> ScalingStudy:
    least = request.thresholds.efficiency
    running = [point for point in points if not point.error]
    broken = next((point for point in running if point.efficiency < least), None)
    usable = [point for point in running if point.fits]
    efficient = [point for point in usable if point.efficiency >= least]
    return ScalingStudy(
        request=request,
        strong=strong,
        points=points,
        break_down=None if broken is None else broken.num_nodes,
        cause="" if broken is None else cause_of(running[0], broken),
        best_by_time=_least(usable, [1.0 / point.samples_per_s for point in usable]),
        best_by_efficiency=max((point.num_nodes for point in efficient), default=None),
        best_by_cost=_least(usable, [_cost_of_a_sample(point) for point in usable]),
    )


def _least(points: Sequence[ScalePoint], values: Sequence[float]) -> int | None:
    """Returns the num_nodes of the least value; of equal ones the fastest."""
    best = [point for point, value in zip(points, values, strict=True) if value <= min(values) * (1 + _EQUAL)]
    return max(best, key=lambda point: point.samples_per_s).num_nodes if best else None


def _cost_of_a_sample(point: ScalePoint) -> float:
    """Returns dollars, or GPU seconds where no price is known."""
    dollars = point.bill.dollars_per_million_samples
    return point.n_gpus / point.samples_per_s if dollars is None else dollars


def cause_of(base: ScalePoint, point: ScalePoint) -> str:
    """Names the part of the step whose GPU time for a sample grows most from `base` to `point`, and by how much."""

    def gpu_s(at: ScalePoint, cause: str) -> float:
        return at.breakdown_s[cause] * at.n_gpus / at.samples_per_step

    cause = max(CAUSES, key=lambda cause: gpu_s(point, cause) - gpu_s(base, cause))
    shares = [at.breakdown_s[cause] / at.step_time_s for at in (base, point)]
    there = f"{base.num_nodes} node{'s' * (base.num_nodes != 1)}"
    if gpu_s(base, cause) <= 0:
        return f"{cause} is {shares[1]:.0%} of the step, and nothing on {there}"
    times = gpu_s(point, cause) / gpu_s(base, cause)
    return (
        f"{cause} takes {times:.3g} times as much GPU time for a sample as on {there}:"
        f" {shares[1]:.0%} of the step, {shares[0]:.0%} there"
    )
