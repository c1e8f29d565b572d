"""predict: build, run, read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.analysis.breakdown import Cause, breakdown_ps, exposed_s
from forerun.analysis.explain import explain
from forerun.analysis.fold import Folded, fold, unfolded
from forerun.analysis.network_use import network_use
from forerun.analysis.prediction import Prediction
from forerun.cluster.types import Cluster
from forerun.cost.step_costs import StepCosts, step_costs
from forerun.engine.simulate import Timeline
from forerun.engine.simulate import simulate as run
from forerun.errors import ForerunError
from forerun.memory.profile import MemoryProfile, profile
from forerun.memory.reserved import outside_allocator_bytes, reserved
from forerun.model.parameters import model_flops_per_token
from forerun.model.spec import ModelSpec
from forerun.network.network_file import Network
from forerun.network.on_topology import check_size
from forerun.plan.constraints import check_plan
from forerun.plan.plan import Plan
from forerun.plan.stack import load_stack
from forerun.program.groups import CommGroup
from forerun.program.types import FlatProgram, Program, Stream
from forerun.program.unfold import unfold
from forerun.symbolic.build import build
from forerun.units import GIB, PS_PER_S

_TIGHT = "memory is full: the allocator retries, which has cost published runs 8 to 27 % of their speed"


_FEW_PASSES = 4
"""passes of the model below which looking for what repeats takes longer than running it"""


@dataclass(frozen=True)
class Simulation:
    """Everything that one prediction was read from."""

    program: Program
    flat: FlatProgram
    costs: StepCosts
    timeline: Timeline
    memory: list[MemoryProfile]
    prediction: Prediction


def predict(model: ModelSpec, plan: Plan, cluster: Cluster, network: Network | None = None) -> Prediction:
    """What one optimizer step of `model` under `plan` does on `cluster`.

    With `network` the GPUs communicate over it, rank r as its NPU r, in place of the links of the cluster.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: an unknown stack, kernel or dtype; a network with fewer NPUs than the plan has GPUs.
    """
    folded = plan.pp * plan.n_microbatches > _FEW_PASSES
    return simulate(model, plan, cluster, folded=folded, network=network).prediction


def simulate(
    model: ModelSpec, plan: Plan, cluster: Cluster, folded: bool = False, network: Network | None = None
) -> Simulation:
    """As `predict`, with the Program, its Timeline and its memory.

    With `folded` the Timeline is of a Program whose equal runs of blocks are single nodes; the figures are the same.
    """
    check_plan(model, plan, cluster)
    if network is not None:
        check_size(network, plan.world_size)
    program = build(model, plan, cluster)
    costs = step_costs(program.ops, program.groups, cluster, load_stack(plan.stack), plan, network)
    reduced = fold(program, costs) if folded else unfolded(program, costs)
    flat, costs = unfold(reduced.program), reduced.costs
    timeline = run(flat, costs.duration_ps, costs.issue_ps, costs.slow_compute, costs.slow_network, costs.network_op)
    memory = profile(program)
    prediction = _read(model, plan, cluster, program, reduced, flat, timeline, memory, network)
    return Simulation(reduced.program, flat, costs, timeline, memory, prediction)


def _read(
    model: ModelSpec,
    plan: Plan,
    cluster: Cluster,
    program: Program,
    reduced: Folded,
    flat: FlatProgram,
    timeline: Timeline,
    memory: list[MemoryProfile],
    network: Network | None,
) -> Prediction:
    step_s = timeline.end_of_step_ps / PS_PER_S
    if step_s <= 0:
        raise ForerunError("the step takes no time: nothing was simulated")
    seconds = breakdown_ps(flat, reduced.program.ops, timeline, reduced.split_ps) / PS_PER_S
    slowest = _busiest(seconds)
    row = seconds[slowest]
    tokens_per_gpu = plan.tokens_per_step / plan.world_size
    peak = _peak(plan, cluster)
    mfu = model_flops_per_token(model, plan.seq_len) * tokens_per_gpu / step_s / peak
    worst = max(range(len(memory)), key=lambda i: memory[i].peak_bytes)
    resident = int(program.rank_classes[worst].resident_bytes.sum())
    groups = _used_groups(program)
    outside = outside_allocator_bytes(len(groups))
    held = reserved(memory[worst].peak_bytes, resident, cluster.device.memory_bytes - outside)
    coverage = _coverage(flat, reduced.costs, timeline)
    price = cluster.price_per_gpu_hour
    use = None if network is None else network_use(program, network, cluster, plan.world_size, step_s)
    causes = {cause.name.lower(): float(row[cause]) for cause in Cause}
    return Prediction(
        model=model.name,
        cluster=cluster.name,
        plan=plan,
        n_gpus=plan.world_size,
        step_time_s=step_s,
        tokens_per_s_per_gpu=tokens_per_gpu / step_s,
        mfu=mfu,
        hfu=_hardware_flops(reduced, flat) / step_s / peak,
        peak_allocated_gib=memory[worst].peak_bytes / GIB,
        peak_reserved_gib=held.peak_bytes / GIB,
        memory_limit_gib=cluster.device.memory_bytes / GIB,
        fits=held.fits,
        warnings=(_TIGHT,) if held.tight else (),
        memory_by_category_gib={name: size / GIB for name, size in memory[worst].by_category.items()},
        peak_rank_class=memory[worst].rank_class,
        peak_owner=memory[worst].owner(program, worst),
        exposed_comm_s=exposed_s(row),
        bubble_s=float(seconds[:, Cause.BUBBLE].mean()),
        breakdown={name: value for name, value in causes.items() if value > 0},
        bottleneck=max(causes, key=lambda name: causes[name]),
        dollars_per_billion_tokens=_dollars(plan, step_s, price),
        coverage=coverage,
        explain=explain(program, cluster, plan, groups, memory[worst], outside, peak, coverage, use),
        network=use,
    )


def _used_groups(program: Program) -> list[CommGroup]:
    """Groups that some collective or transfer of the Program uses: each has a communicator."""
    used = np.unique(program.ops.group[program.ops.group >= 0]).tolist()
    return [program.groups[number] for number in used if program.groups[number].size > 1]


def _busiest(seconds: np.ndarray) -> int:
    """The rank class that waits least for others: the one that sets the pace."""
    return int(np.argmin(seconds[:, Cause.BUBBLE]))


def _peak(plan: Plan, cluster: Cluster) -> float:
    """Dense peak that MFU divides by: of the 16-bit matrix unit, also for fp8 runs, as frameworks report it."""
    device = cluster.device
    wanted = plan.precision if plan.precision in ("fp32", "tf32", "fp16") else "bf16"
    for dtype in (wanted, "bf16", "fp16"):
        if dtype in device.peak_flops:
            return device.peak_flops[dtype]
    return max(device.peak_flops.values())


def _hardware_flops(reduced: Folded, flat: FlatProgram) -> float:
    """FLOPs per GPU that the kernels of the step execute, mean over rank classes of equal size."""
    return float(reduced.flops[flat.op].sum()) / len(reduced.program.rank_classes)


def _dollars(plan: Plan, step_s: float, price: float | None) -> float | None:
    if price is None:
        return None
    return price * plan.world_size * step_s / 3600 / plan.tokens_per_step * 1e9


def _coverage(flat: FlatProgram, costs: StepCosts, timeline: Timeline) -> float:
    """Share of kernel time in calibrated shapes; device-side joins and host delays do not count."""
    spent = (timeline.end_ps - timeline.start_ps) * (flat.stream <= Stream.EP)
    total = float(spent.sum())
    return float((spent * costs.calibrated[flat.op]).sum()) / total if total else 1.0
