"""Bottlenecks: the share of the step, or of the memory, that each resource uses, and its largest contributors.

Shares refer to the step of the slowest rank. Two figures refer to other ranks: waiting is the mean over all ranks,
because the slowest rank waits least, and memory is that of the fullest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.answers.analysis.breakdown import breakdown_ps
from forerun.answers.analysis.reading import Simulation
from forerun.common.units import PS_PER_S
from forerun.core.program.causes import Cause
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import I64, Collective, Stream

WORDS = {
    Cause.MATMUL: "matrix products",
    Cause.ATTENTION: "attention",
    Cause.MEMORY_BOUND: "memory-bound kernels",
    Cause.RECOMPUTE: "recomputation",
    Cause.OPTIMIZER: "optimizer kernels",
}
_COMPUTE = tuple(WORDS)
_KINDS = {
    Collective.ALL_REDUCE: "all-reduce",
    Collective.ALL_GATHER: "all-gather",
    Collective.REDUCE_SCATTER: "reduce-scatter",
    Collective.ALL_TO_ALL: "all-to-all",
    Collective.BROADCAST: "broadcast",
    Collective.SEND_RECV: "transfer",
}
_AXES = {
    "dp_all": "data-parallel ranks",
    "dp_expert": "data-parallel ranks of experts",
    "dp_expert_all": "data-parallel ranks of experts",
    "pp_near": "pipeline stages",
    "pp_far": "pipeline stages",
}
"""group -> name in the report, for groups that are not named like a field of Plan"""


@dataclass(frozen=True)
class Contributor:
    """One part of the use of a resource."""

    name: str
    """`all-gather over dp_shard (8 nodes x 8 ranks)`"""
    value: float
    """seconds of the step, GiB for memory"""
    share: float
    """share of the step, or of the memory limit"""


@dataclass(frozen=True)
class Usage:
    """The share of the step or of the memory that one resource takes."""

    name: str
    """compute, memory, network, pipeline, host; waiting where GPUs differ"""
    value: float
    """share of the step, or of the memory limit"""
    threshold: float
    """value above which the resource is a bottleneck"""
    text: str
    """the value in words"""
    contributors: tuple[Contributor, ...] = ()
    """the largest first"""

    @property
    def is_bottleneck(self) -> bool:
        """Returns whether the value is above the threshold."""
        return self.value > self.threshold


@dataclass(frozen=True)
class Bottlenecks:
    """The resources of a step, with the bottlenecks among them."""

    usages: tuple[Usage, ...]
    """compute, memory, network, pipeline, host; waiting where GPUs differ"""
    matrix_units: float
    """HFU: FLOPs of the model and of recomputation over the FLOPs that the matrix units could execute in the step"""

    def __getitem__(self, name: str) -> Usage:
        """Returns the usage of the resource `name`."""
        return next(usage for usage in self.usages if usage.name == name)

    @property
    def found(self) -> tuple[Usage, ...]:
        """Returns the bottlenecks, the one furthest above its threshold first."""
        over = [usage for usage in self.usages if usage.is_bottleneck]
        return tuple(sorted(over, key=lambda usage: -usage.value / usage.threshold))


def bottlenecks(
    simulation: Simulation, compute: float = 0.80, memory: float = 0.70, network: float = 0.30, waiting: float = 0.10
) -> Bottlenecks:
    """Measures how much of each resource a step takes. `simulation` must be unfolded.

    Args:
        compute: threshold for the share of the step in which kernels run.
        memory: threshold for the share of the fullest GPU's memory.
        network: threshold for the share of the step in which communication runs and no kernel does.
        waiting: threshold for the share of the step in which GPUs wait for other pipeline stages; also for the shares
            in which they wait for slower GPUs and for the host.
    """
    usages = [
        _compute(simulation, compute),
        _memory(simulation, memory),
        _network(simulation, network),
        _pipeline(simulation, waiting),
        _host(simulation, waiting),
    ]
    differing = _waiting(simulation, waiting)
    if differing.value > 0:
        usages.append(differing)
    return Bottlenecks(tuple(usages), simulation.prediction.hfu)


def exposed_by_collective(simulation: Simulation, rank_class: int) -> list[Contributor]:
    """Lists the time in which each collective, transfer or host copy runs beside no kernel of its rank, longest first.

    Where several run at once, the time counts for each of them.
    """
    flat, timeline, program = simulation.flat, simulation.timeline, simulation.program
    first, last = int(flat.class_ptr[rank_class]), int(flat.class_ptr[rank_class + 1])
    stream, op = flat.stream[first:last], flat.op[first:last]
    start, end = timeline.start_ps[first:last], timeline.end_ps[first:last]
    ops = program.ops
    kernels = (stream == Stream.COMPUTE) & ops.is_compute[op]
    before = np.concatenate(([0], np.cumsum(end[kernels] - start[kernels])))
    edges = np.stack([start[kernels], end[kernels]], axis=1).ravel()

    others = np.flatnonzero((end > start) & (ops.is_communication | ops.is_host_copy)[op])
    hidden = _before(end[others], edges, before) - _before(start[others], edges, before)
    alone = end[others] - start[others] - hidden
    sums: dict[str, int] = {}
    for row, time_ps in zip(op[others].tolist(), alone.tolist(), strict=True):
        name = op_name(simulation, row)
        sums[name] = sums.get(name, 0) + time_ps
    step_s = simulation.prediction.step_time_s
    found = [Contributor(name, ps / PS_PER_S, ps / PS_PER_S / step_s) for name, ps in sums.items() if ps > 0]
    return sorted(found, key=lambda each: -each.value)


def _before(time_ps: I64, edges: I64, whole: I64) -> I64:
    """Returns the kernel time before each of `time_ps`, (n,), in ps.

    `edges` (2 k,) are the starts and ends of k kernels in order of time, `whole` (k + 1,) the sums of their durations.
    """
    place = np.searchsorted(edges, time_ps, side="right")
    inside = time_ps - np.concatenate(([0], edges))[place]
    time: I64 = whole[place // 2] + np.where(place % 2 == 1, inside, 0)
    return time


def op_name(simulation: Simulation, row: int) -> str:
    """Names an op that is not a kernel by its work and the ranks that take part."""
    ops = simulation.program.ops
    if not ops.is_communication[row]:
        return "copies between device and host"
    group = simulation.program.groups[ops.group[row]]
    kind = _KINDS.get(Collective(int(ops.collective[row])), "collective")
    return f"{kind} over {_AXES.get(group.axis, group.axis)} ({_layout(group)})"


def _layout(group: CommGroup) -> str:
    return f"{group.nodes} nodes x {group.ranks_per_node}" if group.nodes > 1 else f"{group.size} in a node"


def _compute(simulation: Simulation, threshold: float) -> Usage:
    prediction = simulation.prediction
    step_s, seconds = prediction.step_time_s, prediction.breakdown
    parts = [Contributor(WORDS[cause], t, t / step_s) for cause in _COMPUTE if (t := _spent(seconds, cause)) > 0]
    parts.sort(key=lambda part: -part.value)
    value = sum(part.share for part in parts)
    most = f" ({parts[0].name} for {parts[0].share:.0%})" if parts else ""
    text = f"kernels run for {value:.0%} of the step{most}; HFU is {prediction.hfu:.0%}"
    return Usage("compute", value, threshold, text, tuple(parts))


def _memory(simulation: Simulation, threshold: float) -> Usage:
    prediction = simulation.prediction
    limit = prediction.memory_limit_gib
    sizes = sorted(prediction.memory_by_category_gib.items(), key=lambda item: -item[1])
    parts = tuple(Contributor(name, gib, gib / limit) for name, gib in sizes)
    value = prediction.peak_reserved_gib / limit
    text = f"{prediction.peak_reserved_gib:.1f} of {limit:.1f} GiB are reserved on {prediction.peak_rank_class}"
    if not prediction.fits:
        text += ", which does not fit"
    if parts:
        text += f"; the largest part is {parts[0].name} with {parts[0].value:.1f} GiB"
    return Usage("memory", value, threshold, text, parts)


def _network(simulation: Simulation, threshold: float) -> Usage:
    prediction = simulation.prediction
    value = prediction.exposed_comm_s / prediction.step_time_s
    parts = tuple(exposed_by_collective(simulation, simulation.slowest))
    text = f"communication is exposed (no kernel runs beside it) for {value:.0%} of the step"
    if parts and value > 0:
        text += f", most of it {parts[0].name}: {parts[0].share:.0%}"
    return Usage("network", value, threshold, text, parts)


def _pipeline(simulation: Simulation, threshold: float) -> Usage:
    prediction = simulation.prediction
    value = prediction.bubble_s / prediction.step_time_s
    pace = _spent(prediction.breakdown, Cause.BUBBLE) / prediction.step_time_s
    text = f"GPUs wait for other pipeline stages for {value:.0%} of the step on average, the slowest one for {pace:.0%}"
    return Usage("pipeline", value, threshold, text)


def _waiting(simulation: Simulation, threshold: float) -> Usage:
    """Returns the time that GPUs wait for slower GPUs of the same stage, mean over all GPUs."""
    program = simulation.program
    waiting = breakdown_ps(simulation.flat, program, simulation.timeline)[:, Cause.WAITING] / PS_PER_S
    ranks = np.array([cls.n_ranks for cls in program.rank_classes], np.float64)
    shares = waiting / simulation.prediction.step_time_s
    parts = [Contributor(cls.name, float(waiting[i]), float(shares[i])) for i, cls in enumerate(program.rank_classes)]
    parts = sorted((part for part in parts if part.value > 0), key=lambda part: -part.value)
    value = float((shares * ranks).sum() / ranks.sum())
    most = f", {parts[0].name} most, {parts[0].share:.0%}" if parts else ""
    text = f"GPUs wait for slower GPUs for {value:.0%} of the step on average{most}"
    return Usage("waiting", value, threshold, text, tuple(parts))


def _host(simulation: Simulation, threshold: float) -> Usage:
    prediction = simulation.prediction
    value = _spent(prediction.breakdown, Cause.HOST) / prediction.step_time_s
    text = f"the GPU is idle for {value:.0%} of the step because the host has not launched the next kernel"
    return Usage("host", value, threshold, text)


def _spent(seconds: dict[str, float], cause: Cause) -> float:
    return seconds.get(cause.name.lower(), 0.0)
