"""The costs of every op of a Program: device time, host time, and how kernels and collectives slow each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from forerun.common.units import PS_PER_S, PS_PER_US
from forerun.core.cost.clock import slowest_clock
from forerun.core.cost.gradient_exchange import exchange_s, priced_rows, wires_of
from forerun.core.cost.kernel_constants import kernel_constants
from forerun.core.cost.link_demand import link_demand
from forerun.core.cost.measured import Measured
from forerun.core.cost.op_costs import durations_ps, on_topology
from forerun.core.cost.physics import refuse_faster
from forerun.core.cost.rates import rates_of
from forerun.core.cost.recorded import recorded_ps
from forerun.core.engine.sharing import LinkDemand
from forerun.core.network.host_path import host_path_s_per_byte
from forerun.core.network.network_file import Network
from forerun.core.network.patterns import CommunicationPattern
from forerun.core.program.groups import CommGroup
from forerun.core.program.origin import Recorded
from forerun.core.program.types import F64, I64, Collective, OpTable
from forerun.describe.cluster.types import Cluster
from forerun.describe.kernels.dispatchers import transport_of
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.rules import breaks_graphs, token_dispatcher
from forerun.describe.stacks.stack import Stack


@dataclass(frozen=True, slots=True)
class Launching:
    """Describes how kernels are launched: one by one from the host, from torch.compile's code, or from a CUDA graph."""

    compiled: bool = False
    """whether all ops run in compiled regions"""
    compiled_ops: tuple[int, ...] = ()
    """ops that run in compiled regions where not all do"""
    cuda_graphs: bool = False
    reserved_sms: int = 0
    """multiprocessors that kernels leave to those of a dispatcher of tokens, throughout the step"""

    @staticmethod
    def of_plan(model: ModelSpec | LayeredModel, plan: Plan, stack: Stack) -> Launching:
        """Returns how the kernels of `model` are launched under a plan that `stack` runs."""
        compiled = plan.compiles_layers and stack.inductor and not breaks_graphs(model, plan, stack)
        transport = token_dispatcher(plan, stack).transport if plan.expert_overlap else None
        reserved = 0 if transport is None else transport.sms
        return Launching(compiled=compiled, cuda_graphs=plan.cuda_graphs, reserved_sms=reserved)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Columns with one entry per op."""

    duration_ps: I64
    issue_ps: I64
    slow_compute: F64
    slow_network: F64
    network_op: npt.NDArray[np.bool_]
    calibrated: F64
    """1 if the shape lies in the measured range, else 0"""
    lacks: Mapping[int, str] = field(default_factory=dict)
    """op -> the measurement that the user's files lack for it"""
    demand: LinkDemand | None = None
    """the shares of links that collectives and transfers use"""


def step_costs(
    ops: OpTable,
    groups: tuple[CommGroup, ...],
    cluster: Cluster,
    stack: Stack,
    launching: Launching,
    n_gpus: int,
    network: Network | None = None,
    measured: Measured | None = None,
    pattern: CommunicationPattern | None = None,
    recorded: Recorded | None = None,
) -> StepCosts:
    """Returns the costs of `ops` in a run of `n_gpus` GPUs of `cluster` under `stack`.

    Products and attention run at the clock of the slowest GPU. Collectives run on `network` if given. Without it, none
    is faster than the path through host memory that GPUs without peer access share; the stack's rates do not change
    that path. Times in `measured` replace all others and are scaled neither by the clock of long steps nor by the
    stack's rates. Collectives that `pattern` prices ignore `measured`, which holds times of NCCL's algorithms. Products
    in compiled regions are padded where that pays. Times of a profiled step (`recorded`) replace those of the models.
    They already contain the slowing by the work that ran beside each op, so nothing slows them again. Nothing slows the
    user's own times of such ops either. Each kernel pays the gap between two launches on the device; under CUDA graphs
    host time and gap are 0.
    """
    rates = rates_of(cluster, stack)
    pace = slowest_clock(n_gpus) * (1.0 - launching.reserved_sms / cluster.device.multiprocessors)
    rates = replace(rates, gemm=rates.gemm * pace, attention=rates.attention * pace)
    placed = None if network is None else on_topology(network, cluster, n_gpus)
    duration, calibrated = durations_ps(ops, groups, cluster, rates, placed, launching.compiled_ops)
    on_links = network is None
    least_ps = _host_path_ps(ops, groups, cluster, n_gpus) if on_links else np.zeros(len(ops), np.int64)
    duration = np.maximum(duration, least_ps)
    lacks: Mapping[int, str] = {}
    unbound = np.zeros(len(ops), np.bool_)
    issue_ps = ops.launches.astype(np.int64) * _issue_ps(stack, launching, len(ops))
    issue_ps += _module_ps(ops, stack, launching, cluster)
    if cluster.rates.host != 1.0:
        issue_ps = np.rint(issue_ps / cluster.rates.host).astype(np.int64)
    known = np.zeros(len(ops), np.bool_)
    if measured is not None:
        found = measured.lookup(ops, groups)
        known = ~np.isnan(found.time_s)
        duration[known] = np.rint(found.time_s[known] * PS_PER_S).astype(np.int64)
        calibrated[known] = found.inside[known]
        lacks, unbound = found.lacks, known.copy()
    unknown: I64 | None = None
    if pattern is not None:
        rows = priced_rows(ops, groups, pattern)
        time_s = exchange_s(ops, rows, groups, pattern, wires_of(cluster, n_gpus, network))
        time_s /= rates.network if pattern.as_nccl else 1.0
        duration[rows], calibrated[rows] = np.rint(time_s * PS_PER_S).astype(np.int64), 0.0
        if pattern.as_nccl:
            duration[rows] = np.maximum(duration[rows], least_ps[rows])
        unknown = None if pattern.as_nccl else rows
        unbound[rows] = True
        if pattern.everything:
            issue_ps[rows] = 0
        lacks = {op: what for op, what in lacks.items() if op not in set(rows.tolist())}
    replayed = np.zeros(len(ops), np.bool_)
    if recorded is not None:
        times_ps = recorded_ps(ops, groups, recorded, cluster, stack, placed)
        replayed = times_ps >= 0
        taken = replayed & ~known
        duration[taken], calibrated[taken] = times_ps[taken], 1.0
        unknown = np.flatnonzero(replayed) if unknown is None else np.union1d(np.flatnonzero(replayed), unknown)
    refuse_faster(ops, groups, cluster, duration, unbound | replayed, on_links, rates.network)
    kernel = ops.is_compute & ~replayed
    duration = duration + np.where(kernel, gap_ps(ops, stack, launching), 0)
    on_network = ops.is_collective
    demand = link_demand(ops, groups, duration, cluster, placed, without=unknown, host_path_ps=least_ps)
    return StepCosts(
        duration_ps=duration,
        issue_ps=issue_ps,
        slow_compute=np.where(kernel, 0.0 if launching.reserved_sms else stack.overlap_slowdown, 0.0),
        slow_network=_slow_exchanges(ops),
        network_op=on_network,
        calibrated=calibrated,
        lacks=lacks,
        demand=demand,
    )


def gap_ps(ops: OpTable, stack: Stack, launching: Launching) -> I64:
    """Returns the picoseconds that the device loses between the kernels of each op, (n_ops,)."""
    gap_us = 0.0 if launching.cuda_graphs else stack.kernel_gap_us + stack.launch_blocking_us
    out: I64 = ops.launches.astype(np.int64) * int(gap_us * PS_PER_US)
    return out


def _slow_exchanges(ops: OpTable) -> F64:
    """Returns how much longer the kernels of dispatchers take beside others, as a share of their time, (n_ops,)."""
    slow = np.zeros(len(ops))
    for row in np.flatnonzero(ops.is_collective).tolist():
        if ops.kernel[row]:
            slow[row] = transport_of(ops.kernel[row]).beside_compute
    return slow


def _host_path_ps(ops: OpTable, groups: tuple[CommGroup, ...], cluster: Cluster, n_gpus: int) -> I64:
    """Returns the least picoseconds of each op on the way through host memory, (n_ops,); 0 with peer access."""
    slope = np.zeros(len(ops))
    if not cluster.links[0].peer_to_peer:
        for row in np.flatnonzero(ops.is_communication).tolist():
            kind, group = Collective(int(ops.collective[row])), groups[ops.group[row]]
            slope[row] = host_path_s_per_byte(kind, group, cluster, n_gpus)
    out: I64 = np.rint(ops.bytes_comm * slope * PS_PER_S).astype(np.int64)
    return out


def _module_ps(ops: OpTable, stack: Stack, launching: Launching, cluster: Cluster) -> I64:
    """Returns the host's time in the Python around each op in picoseconds, (n_ops,); compiled and captured ops have
    none."""
    eager = ops.is_compute & (ops.launches > 0)
    eager[list(launching.compiled_ops)] = False
    if launching.compiled or launching.cuda_graphs:
        eager[:] = False
    return np.where(eager, int(stack.module_us / cluster.host_speed * PS_PER_US), 0)


def _issue_ps(stack: Stack, launching: Launching, n_ops: int) -> I64:
    """Returns the host's time for one launch of each op in picoseconds, (n_ops,)."""
    if launching.cuda_graphs:
        return np.full(n_ops, int(kernel_constants().cuda_graph.issue_us * PS_PER_US), np.int64)
    issue_us = np.full(n_ops, stack.compiled_issue_us if launching.compiled else stack.issue_us)
    issue_us[list(launching.compiled_ops)] = stack.compiled_issue_us
    out: I64 = (issue_us * PS_PER_US).astype(np.int64)
    return out
