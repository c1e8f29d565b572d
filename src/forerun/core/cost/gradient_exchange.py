"""Computes the times of the gradients' all-reduces from a communication pattern instead of NCCL's choice of
algorithm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.common.errors import ForerunError
from forerun.core.cost.memory_bound import memory_rates
from forerun.core.cost.profile import load_profile
from forerun.core.network.network_file import Network
from forerun.core.network.patterns import CommunicationPattern, Wires
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, I64, Collective, OpTable
from forerun.describe.cluster.types import Cluster

_MODEL_AXES = frozenset({"tp", "sp", "cp", "ep", "pp"})
"""words in the names of groups that do not reduce gradients, unless a word of _DATA_AXES is there too"""
_DATA_AXES = frozenset({"dp", "ddp", "fsdp"})
_GRADIENTS = (".grads", ".replicas")
"""suffixes of the names of the gradients' all-reduces in Forerun's own Programs"""
_NORMS = "grad_norm"
_FEW_BYTES = 8192
"""all-reduces of other Programs up to so many bytes are norms and losses: 4 bytes for each of 2048 tensors"""


def wires_of(cluster: Cluster, n_gpus: int, network: Network | None = None) -> Wires:
    """Returns the links that a pattern runs on: those of `n_gpus` GPUs of `cluster`, or of `network` if given."""
    memory = memory_rates(cluster.device)
    measured = load_profile(cluster.device.cost_profile).collectives
    return Wires(cluster, n_gpus, network, measured, memory.bytes_per_s, memory.launch_s)


def gradient_rows(ops: OpTable, groups: Sequence[CommGroup]) -> I64:
    """Returns the rows of `ops` that all-reduce gradients over data-parallel ranks.

    Forerun's own Programs name them. In traced Programs they are the all-reduces over groups that are not named after
    another mesh axis, of more bytes than the norms of all tensors take.
    """
    rows = np.flatnonzero(ops.is_collective & (ops.collective == Collective.ALL_REDUCE))
    found = [row for row in rows.tolist() if _is_gradient(ops, row, groups[ops.group[row]])]
    return np.array(found, np.int64)


def _is_gradient(ops: OpTable, row: int, group: CommGroup) -> bool:
    words = set(group.axis.lower().split("_"))
    if group.size == 1 or (words & _MODEL_AXES and not words & _DATA_AXES):
        return False
    name = ops.name[row]
    return name.endswith(_GRADIENTS) or (not name.startswith(_NORMS) and bool(ops.bytes_comm[row] > _FEW_BYTES))


def priced_rows(ops: OpTable, groups: Sequence[CommGroup], pattern: CommunicationPattern) -> I64:
    """Returns the rows of `ops` that `pattern` prices."""
    if not pattern.everything:
        return gradient_rows(ops, groups)
    return np.flatnonzero(ops.is_communication)


def exchange_s(
    ops: OpTable, rows: I64, groups: Sequence[CommGroup], pattern: CommunicationPattern, wires: Wires
) -> F64:
    """Returns the seconds of `rows` of `ops` by `pattern`, (rows,); 0 in groups of one rank.

    Raises:
        ForerunError: the pattern, which may be user code, returned no array of times.
    """
    time_s = np.zeros(len(rows))
    number = ops.group[rows]
    for group in np.unique(number).tolist():
        same = np.flatnonzero(number == group)
        if groups[group].size > 1:
            time_s[same] = _checked(
                pattern, pattern.seconds(ops.bytes_comm[rows[same]], groups[group], wires), len(same)
            )
    return time_s


def _checked(pattern: CommunicationPattern, time_s: F64, n: int) -> F64:
    if np.shape(time_s) != (n,) or not (np.isfinite(time_s).all() and (time_s >= 0).all()):
        raise ForerunError(
            f"communication pattern {pattern.name}: seconds() gave {time_s!r} for {n} sizes; it must return an array of"
            f" {n} seconds of at least 0"
        )
    return time_s
