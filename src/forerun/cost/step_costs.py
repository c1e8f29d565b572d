"""What every op of a Program costs a step: device time, host time, and how kernels and collectives slow each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.cluster.types import Cluster
from forerun.cost.op_costs import KernelRates, durations_ps, on_topology
from forerun.network.network_file import Network
from forerun.plan.plan import Plan
from forerun.plan.stack import Stack
from forerun.program.groups import CommGroup
from forerun.program.types import F64, I64, OpKind, OpTable
from forerun.units import PS_PER_US


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Columns with one entry per op."""

    duration_ps: I64
    issue_ps: I64
    slow_compute: F64
    slow_network: F64
    network_op: npt.NDArray[np.bool_]
    calibrated: F64
    """1 where the shape lies in the range that was measured"""


def step_costs(
    ops: OpTable,
    groups: tuple[CommGroup, ...],
    cluster: Cluster,
    stack: Stack,
    plan: Plan,
    network: Network | None = None,
) -> StepCosts:
    """Costs of `ops` on `cluster` under the habits of `stack`, with the collectives on `network` where there is one.

    Kernels pay the gap between two launches on the device; under CUDA graphs host and gap cost nothing.
    """
    rates = KernelRates(
        gemm=stack.gemm_rate,
        attention=stack.attention_rate,
        memory=stack.memory_rate,
        network=stack.network_rate,
    )
    placed = None if network is None else on_topology(network, cluster, plan.world_size)
    duration, calibrated = durations_ps(ops, groups, cluster, rates, placed)
    kernel = ops.kind <= OpKind.MEMORY
    launches = ops.launches.astype(np.int64)
    gap_us = 0.0 if plan.cuda_graphs else stack.kernel_gap_us + stack.launch_blocking_us
    duration = duration + np.where(kernel, launches, 0) * int(gap_us * PS_PER_US)
    issue_us = stack.compiled_issue_us if plan.compile else stack.issue_us
    issue = launches * int((0.05 if plan.cuda_graphs else issue_us) * PS_PER_US)
    on_network = ops.kind == OpKind.COLLECTIVE
    return StepCosts(
        duration_ps=duration,
        issue_ps=issue,
        slow_compute=np.where(kernel, stack.overlap_slowdown, 0.0),
        slow_network=np.zeros(len(ops)),
        network_op=on_network,
        calibrated=calibrated,
    )
