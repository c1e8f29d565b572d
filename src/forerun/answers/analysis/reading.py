"""Runs a Program with its costs and reads a Prediction from the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from forerun.answers.analysis.breakdown import breakdown_ps, exposed_s, pace_setter
from forerun.answers.analysis.coverage import Coverage, coverage
from forerun.answers.analysis.doubts import doubts_of_step
from forerun.answers.analysis.explain import explain
from forerun.answers.analysis.fold_program import Folded, fold, unfolded
from forerun.answers.analysis.link_sharing import link_notes, shared_ps
from forerun.answers.analysis.memory_need import MemoryNeed, memory_need
from forerun.answers.analysis.network_use import network_use
from forerun.answers.analysis.physics_gate import checked, utilization
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.uncertainty import Work, band_words, memory_band, time_band
from forerun.common.errors import ForerunError
from forerun.common.shown import Shown
from forerun.common.units import GIB, PS_PER_S, TERA
from forerun.core.cost.measured import Measured
from forerun.core.cost.step_costs import Launching, StepCosts, step_costs
from forerun.core.engine.simulate import Timeline
from forerun.core.engine.simulate import simulate as run_engine
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.profile import MemoryProfile
from forerun.core.network.host_path import host_path_warnings
from forerun.core.network.network_file import Network
from forerun.core.network.patterns import CommunicationPattern
from forerun.core.program.causes import Cause
from forerun.core.program.counts import EVERY_PHASE, counts_in
from forerun.core.program.model_flops import counted_flops
from forerun.core.program.origin import PROFILE, Origin
from forerun.core.program.types import F64, I64, FlatProgram, Phase, Program
from forerun.core.program.unfold import unfold
from forerun.describe.cluster.types import Cluster, Device
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.stack import Stack

_LONGEST_STEP_S = 4e6
"""the sum of all times of a rank; picoseconds of twice as much leave 64 bits"""
TIGHT = "memory is nearly full: the allocator frees cached blocks and retries, and step time does not include this"
"""the warning of a Prediction that fits only if the allocator gives back its cache"""


@dataclass(frozen=True)
class Subject:
    """The model, plan and work that a Program stands for, as far as they are known."""

    name: str
    n_gpus: int
    stack: Stack
    launching: Launching
    precision: str
    """dtype whose peak FLOP/s MFU divides by"""
    tokens_per_step: int | None
    """tokens of a step over all GPUs"""
    model_flops: float | None
    """model FLOPs of a GPU in a step"""
    model_flops_how: str
    """the FLOPs that `model_flops` counts, in words"""
    plan: Plan | None = None
    experts: bool = False
    """whether the model has a mixture of experts"""
    pattern: CommunicationPattern | None = None
    """how ranks exchange gradients; None: as NCCL does"""
    sample: str | None = None
    """one sample of a model given layer by layer (image, sequence); None for a model of tokens"""
    samples_per_step: int | None = None
    """samples of a step over all GPUs"""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """further lines of `explain`"""
    residuals: str | None = None
    """group of residuals that the bands come from (`uncertainty.py`); None for that of the stack"""
    fell_back: bool = False
    """whether code that the user compiles was traced uncompiled"""


@dataclass(frozen=True)
class Simulation(Shown):
    """A Prediction with everything that it was read from."""

    program: Program
    flat: FlatProgram
    costs: StepCosts
    timeline: Timeline
    memory: list[MemoryProfile]
    prediction: Prediction
    subject: Subject
    slowest: int
    """the rank class that sets the pace"""

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns the row of the prediction."""
        return self.prediction.to_rows()

    @property
    def model_flops_per_token(self) -> float | None:
        """Returns the model FLOPs of a token; None if FLOPs or tokens are not known."""
        subject = self.subject
        if subject.model_flops is None or subject.tokens_per_step is None:
            return None
        return subject.model_flops * subject.n_gpus / subject.tokens_per_step


def simulate_program(
    program: Program,
    subject: Subject,
    cluster: Cluster,
    *,
    folded: bool,
    network: Network | None = None,
    measured: Measured | None = None,
    replays: bool = False,
) -> Simulation:
    """Runs `program` on `cluster` and reads its Prediction. With `replays` a replay of the allocator finds the memory.

    With `folded` each run of closed blocks is a single node of the Timeline; the figures are the same.
    """
    costs = step_costs(
        program.ops,
        program.groups,
        cluster,
        subject.stack,
        subject.launching,
        subject.n_gpus,
        network,
        measured,
        recorded=Origin.of(program).recorded,
    )
    return simulate_costed(
        program,
        costs,
        subject,
        cluster,
        folded=folded,
        network=network,
        is_measured=measured is not None,
        replays=replays,
    )


def simulate_costed(
    program: Program,
    costs: StepCosts,
    subject: Subject,
    cluster: Cluster,
    *,
    folded: bool,
    network: Network | None = None,
    is_measured: bool = False,
    devices: Sequence[Device] = (),
    replays: bool = False,
    memory: MemoryNeed | None = None,
) -> Simulation:
    """Runs and reads a Program like `simulate_program`, with the given costs of its ops.

    With `is_measured` the prediction lists the ops that the user's measurements lack. `devices` has one device for each
    rank class unless all are the cluster's. With `replays` the allocator is replayed; else reserved memory is an
    estimate. `memory` is the memory that the Program needs, if the caller knows it already.
    """
    counts, again = counts_in(program, EVERY_PHASE, (Phase.RECOMPUTE,))
    _refuse_endless(counts, costs)
    missing = _missing(counts, costs) if is_measured else None
    reduced = fold(program, costs) if folded else unfolded(program, costs)
    covered = coverage(program, counts, costs)
    flat, costs = unfold(reduced.program), reduced.costs
    timeline = run_engine(
        flat,
        costs.duration_ps,
        costs.issue_ps,
        costs.slow_compute,
        costs.slow_network,
        costs.network_op,
        demand=costs.demand,
    )
    memory = memory or memory_of(program, subject, cluster, devices, replays)
    peak = _mean_peak(subject.precision, program, cluster, devices)
    dtype = _peak_dtype(subject.precision, cluster.device)
    ran = _Ran(program, counts, again, reduced, flat, timeline, memory, covered, peak, dtype, missing, devices)
    prediction = _read(subject, cluster, network, ran)
    return Simulation(reduced.program, flat, costs, timeline, memory.profiles, prediction, subject, ran.slowest)


def memory_of(
    program: Program, subject: Subject, cluster: Cluster, devices: Sequence[Device], replays: bool
) -> MemoryNeed:
    """Returns the memory that `program` needs; see `simulate_costed`."""
    settings = AllocatorSettings.parse(subject.stack.allocator) if replays else None
    graphs = subject.launching.compiled and subject.launching.cuda_graphs
    return memory_need(program, cluster, subject.stack, devices, settings, graphs)


def _refuse_endless(counts: I64, costs: StepCosts) -> None:
    """Raises ForerunError if the times of a rank's ops sum to more than 64 bits of picoseconds hold."""
    longest_s = float((counts @ costs.duration_ps.astype(np.float64)).max(initial=0.0)) / PS_PER_S
    if longest_s > _LONGEST_STEP_S:
        days, most = longest_s / 86400, _LONGEST_STEP_S / 86400
        doubt = "are the sizes of the model and the plan, and the rates of the cluster right?"
        raise ForerunError(f"a step of {days:,.0f} days; at most {most:,.0f} are simulated; {doubt}")


@dataclass(frozen=True)
class _Ran:
    """A Program that was run, with the figures that its Prediction is read from."""

    program: Program
    """the Program before folding"""
    counts: I64
    """how often each rank class runs each op, (n_classes, n_ops)"""
    again: I64
    """how often each rank class recomputes each op, (n_classes, n_ops)"""
    reduced: Folded
    flat: FlatProgram
    timeline: Timeline
    memory: MemoryNeed
    covered: Coverage
    peak: float
    """dense peak FLOP/s that MFU divides by"""
    peak_dtype: str
    missing: tuple[str, ...] | None
    """ops that the user's measurements lack; None if no measurements were given"""
    devices: Sequence[Device]
    """the device of each rank class; empty if all are the cluster's"""

    @cached_property
    def seconds(self) -> F64:
        """Returns the seconds by rank class and Cause, (n_classes, N_CAUSES)."""
        out: F64 = breakdown_ps(self.flat, self.reduced.program, self.timeline, self.reduced.split_ps) / PS_PER_S
        return out

    @property
    def slowest(self) -> int:
        """Returns the rank class that sets the pace."""
        return pace_setter(self.seconds)

    @property
    def shared_s(self) -> float:
        """Returns the seconds that sharing links adds to the collectives and transfers of the slowest rank class."""
        added_ps = shared_ps(self.flat, self.reduced.costs, self.timeline, self.reduced.shared_ps)
        return float(added_ps[self.slowest]) / PS_PER_S


def _read(subject: Subject, cluster: Cluster, network: Network | None, ran: _Ran) -> Prediction:
    program, memory, covered, peak = ran.program, ran.memory, ran.covered, ran.peak
    step_s = ran.timeline.end_of_step_ps / PS_PER_S
    if step_s <= 0:
        raise ForerunError("the step takes no time: nothing was simulated")
    row, shared_s = ran.seconds[ran.slowest], ran.shared_s
    fullest, held = memory.fullest, memory.held
    exposed = exposed_s(row)
    group = subject.residuals
    band = time_band(subject.stack, cluster, subject.n_gpus, covered.share, exposed / step_s, group)
    low_s, high_s = (band.uncompiled() if subject.fell_back else band).of(step_s)
    held_low, held_high = memory_band(subject.stack, "reserved", group).of(held.peak_bytes)
    available = memory.limit_bytes - memory.outside_bytes
    least, most = memory_band(subject.stack, "allocated", group).of(held.least_bytes)
    use = None
    if network is not None:
        use = network_use(program, network, cluster, subject.n_gpus, step_s, subject.pattern)
    priced_here = network is None and ran.missing is None
    staged = host_path_warnings(memory.groups, cluster, subject.n_gpus) if priced_here else ()
    causes = {cause.name.lower(): float(row[cause]) for cause in Cause}
    tokens = None if subject.tokens_per_step is None else subject.tokens_per_step / subject.n_gpus
    again = counted_flops(program, ran.again)
    bubble = float((ran.seconds[:, Cause.BUBBLE] * _weights(program)).mean())
    waits = doubts_of_step(subject.plan, bubble, step_s)
    made = Prediction(
        model=subject.name,
        cluster=cluster.name,
        plan=subject.plan,
        n_gpus=subject.n_gpus,
        step_time_s=step_s,
        step_time_low_s=low_s,
        step_time_high_s=high_s,
        tokens_per_s_per_gpu=None if tokens is None else tokens / step_s,
        mfu=None if subject.model_flops is None else subject.model_flops / step_s / peak,
        hfu=((subject.model_flops or 0.0) + again) / step_s / peak,
        peak_allocated_gib=fullest.peak_bytes / GIB,
        peak_reserved_gib=held.peak_bytes / GIB,
        peak_reserved_low_gib=held_low / GIB,
        peak_reserved_high_gib=(min(held_high, available) if held.fits else held_high) / GIB,
        device_gib=(held.peak_bytes + memory.outside_bytes) / GIB,
        memory_limit_gib=memory.limit_bytes / GIB,
        fits=held.fits,
        fit_in_doubt=available < most if held.fits else least <= available,
        warnings=(*((TIGHT,) if held.tight else ()), *staged, *subject.warnings, *cluster.doubts, *waits),
        memory_by_category_gib={name: size / GIB for name, size in fullest.by_category.items()},
        peak_rank_class=fullest.rank_class,
        peak_owner=fullest.owner(program, memory.worst),
        exposed_comm_s=exposed,
        bubble_s=bubble,
        breakdown={name: value for name, value in causes.items() if value > 0},
        bottleneck=max(causes, key=lambda name: causes[name]),
        dollars_per_billion_tokens=_dollars(subject, step_s, cluster.price_per_gpu_hour),
        coverage=covered.share,
        explain=explain(
            program,
            cluster,
            subject.stack,
            memory,
            f"{subject.model_flops_how}, attention as if nothing were masked, over the dense peak of {ran.peak_dtype},"
            f" {peak / TERA:,.0f} TFLOP/s",
            covered,
            band_words(
                subject.stack,
                cluster,
                subject.n_gpus,
                covered.share,
                exposed / step_s,
                group,
                subject.fell_back,
                Work(subject.precision, subject.experts) if subject.plan else None,
            ),
            use,
            (*link_notes(shared_s), *subject.notes),
        ),
        network=use,
        missing=ran.missing,
        sample=subject.sample,
        samples_per_s_per_gpu=None
        if subject.samples_per_step is None
        else subject.samples_per_step / subject.n_gpus / step_s,
        shared_links_s=shared_s,
        memory_recorded=_memory_recorded(program),
        mfu_peak=f"{ran.peak_dtype}, {peak / TERA:,.0f} TFLOP/s",
        utilization=utilization(program, ran.counts, ran.devices or (cluster.device,), step_s),
    )
    return checked(made, ran.missing is not None)


def _memory_recorded(program: Program) -> bool:
    """Returns whether the memory of a program is known: a profile need not record it."""
    return any(cls.resident_bytes.any() for cls in program.rank_classes) or Origin.of(program).source != PROFILE


def _missing(counts: I64, costs: StepCosts) -> tuple[str, ...]:
    """Lists the ops that the measurements lack, by their time in a step on the rank that spends most in them."""
    times = (counts * costs.duration_ps).max(axis=0, initial=0)
    spent: dict[str, int] = {}
    for op, what in costs.lacks.items():
        if times[op] > 0:
            spent[what] = spent.get(what, 0) + int(times[op])
    by_time = sorted(spent.items(), key=lambda item: -item[1])
    return tuple(f"{what} ({time_ps / PS_PER_S * 1e3:.3g} ms of a step)" for what, time_ps in by_time)


def _mean_peak(precision: str, program: Program, cluster: Cluster, devices: Sequence[Device]) -> float:
    """Returns the dense peak FLOP/s that MFU divides by, mean over ranks."""
    if not devices:
        return _peak(precision, cluster.device)
    peaks = np.array([_peak(precision, device) for device in devices])
    return float((peaks * _weights(program)).mean())


def _peak(precision: str, device: Device) -> float:
    return device.peak_flops[_peak_dtype(precision, device)]


def _peak_dtype(precision: str, device: Device) -> str:
    """Returns the dtype of the dense peak that MFU divides by: 16 bits also for fp8 runs, as frameworks report it."""
    wanted = precision if precision in ("fp32", "tf32", "fp16") else "bf16"
    known = (dtype for dtype in (wanted, "bf16", "fp16") if dtype in device.peak_flops)
    return next(known, max(device.peak_flops, key=lambda dtype: device.peak_flops[dtype]))


def _weights(program: Program) -> F64:
    """Returns the number of ranks of each class over the mean number, (n_classes,)."""
    ranks = np.array([cls.n_ranks for cls in program.rank_classes], np.float64)
    weights: F64 = ranks / ranks.mean()
    return weights


def _dollars(subject: Subject, step_s: float, price: float | None) -> float | None:
    if price is None or subject.tokens_per_step is None:
        return None
    return price * subject.n_gpus * step_s / 3600 / subject.tokens_per_step * 1e9
