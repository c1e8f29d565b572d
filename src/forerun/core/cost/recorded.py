"""The times of a profiled step on another device, network or number of GPUs: scaled by the ratio of the models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.core.cost.op_costs import durations_ps
from forerun.core.cost.rates import rates_of
from forerun.core.network.on_topology import OnTopology
from forerun.core.program.groups import CommGroup
from forerun.core.program.origin import Recorded
from forerun.core.program.types import I64, OpTable
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.describe.stacks.catalog import load_stack
from forerun.describe.stacks.stack import Stack

_NONE = -1
_STACK = "pytorch"
"""the stack whose rates and launches the recorded times stand for: always plain PyTorch"""


def recorded_ps(
    ops: OpTable,
    groups: Sequence[CommGroup],
    recorded: Recorded,
    cluster: Cluster,
    stack: Stack,
    network: OnTopology | None = None,
) -> I64:
    """Returns picoseconds of every op of a profiled step on `cluster`, (n_ops,), -1 for those without a recorded time.

    Each time is the recorded one times a ratio: the modelled time on `cluster` over the modelled time on the reference
    system of the device that the profile comes from. An op whose amount of work is unknown keeps its time. If that
    device is unknown, all ops keep their times. The host's own time follows the stack's time of a launch, on any
    system.

    Raises ForerunError like `durations_ps`.
    """
    out = np.full(len(ops), _NONE, np.int64)
    out[: len(recorded.time_ps)] = recorded.time_ps
    usual = load_stack(_STACK)
    hosts = np.array(recorded.host_ops, np.int64)
    slower = stack.issue_us / usual.issue_us / cluster.rates.host
    out[hosts] = np.rint(ops.delay(hosts).duration_ps * slower).astype(np.int64)
    if not recorded.device:
        return out
    reference = load_cluster(recorded.device)
    amounts = ops.flops + ops.bytes_read + ops.bytes_written + ops.bytes_comm
    rows = np.flatnonzero((out >= 0) & (amounts > 0))
    before = [
        CommGroup.of_ranks(group.axis, sorted(ranks), reference.node_size) if ranks else group
        for group, ranks in zip(groups, recorded.group_ranks, strict=True)
    ]
    some = ops.take(rows)
    there, _ = durations_ps(some, before, reference, rates_of(reference, usual))
    here, _ = durations_ps(some, groups, cluster, rates_of(cluster, stack), network)
    ratio = np.where(there > 0, here / np.maximum(there, 1), 1.0)
    out[rows] = np.rint(out[rows] * ratio).astype(np.int64)
    return out
