"""The least time that each op can take: its FLOPs at the peak of its own dtype, its bytes at the rate of its link.

A cost below it is a mistake of a cost model. `refuse_faster` is the part of the gate that sees single kernels and
collectives; `answers/analysis/physics_gate.py` sees the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from forerun.common.errors import ImpossibleResult
from forerun.common.units import PS_PER_S
from forerun.core.cost.attention import FOUR_BYTES, four_byte_peak, two_byte_unit
from forerun.core.cost.gemm import gemm_rates
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, I64, Collective, Mask, OpTable
from forerun.describe.cluster.types import Cluster, Device
from forerun.describe.kernels.attention import fused_kernel

_ROUNDING = 1.001
_NEGLIGIBLE_S = 1e-9
_WHOLE = (Collective.SEND_RECV, Collective.BROADCAST)
"""collectives in which a link carries the whole buffer; in all others a rank's own share stays where it is"""


def refuse_faster(
    ops: OpTable,
    groups: Sequence[CommGroup],
    cluster: Cluster,
    duration_ps: I64,
    unbound: Mask,
    on_links: bool,
    network_rate: float = 1.0,
) -> None:
    """Raises ImpossibleResult for an op that takes less time than physics needs.

    Args:
        duration_ps: picoseconds of each op, (n_ops,).
        unbound: ops whose time is measured by the user or follows from a pattern of messages, (n_ops,).
        on_links: whether collectives run on the links of the cluster, not on a topology.
        network_rate: factor on the rate of the links, for a question such as "what if they were free".
    """
    least_s = least_compute_s(ops, cluster.device)
    if on_links:
        rows = np.flatnonzero(ops.is_communication & ~unbound)
        rates = _fastest_links(cluster)
        least_s[rows] = [_least_on_links_s(ops, row, groups[ops.group[row]], rates) for row in rows.tolist()]
        least_s[rows] /= max(1.0, network_rate)
    time_s = duration_ps / PS_PER_S
    faster = np.flatnonzero((time_s * _ROUNDING + _NEGLIGIBLE_S < least_s) & ~unbound)
    if len(faster):
        row = int(faster[np.argmax(least_s[faster] / np.maximum(time_s[faster], 1e-12))])
        limit = "the links" if ops.is_communication[row] else f"{cluster.device.name}'s peak"
        raise ImpossibleResult(
            f"a bug of Forerun: {ops.name[row]} takes {time_s[row]:.4g} s on {cluster.name}, but {limit} need"
            f" {least_s[row]:.4g} s for its {ops.flops[row]:.4g} FLOPs in {ops.dtype[row] or 'no dtype'} and"
            f" {ops.bytes_comm[row] or ops.bytes_read[row] + ops.bytes_written[row]:.4g} bytes; please report it"
        )


def least_compute_s(ops: OpTable, device: Device) -> F64:
    """Returns the seconds of each op's FLOPs at its kernel's peak, and of a memory-bound kernel's bytes, (n_ops,).

    Ops of the network, of the host and delays need none.
    """
    peaks = {dtype: _peak(device, dtype) for dtype in set(ops.dtype)}
    peak = np.array([peaks[dtype] for dtype in ops.dtype])
    for row in np.flatnonzero(ops.is_attention).tolist():
        if ops.dtype[row] in FOUR_BYTES:
            own = four_byte_peak(device, fused_kernel(ops.kernel[row]), ops.dtype[row])
            peak[row] = max(peak[row], own)
    least: F64 = np.where(ops.is_gemm | ops.is_attention | ops.is_scan, ops.flops / peak, 0.0)
    moved = (ops.bytes_read + ops.bytes_written) / device.memory_bytes_per_s
    return np.where(ops.is_memory_bound, moved, least)


@lru_cache(maxsize=1024)
def _peak(device: Device, dtype: str) -> float:
    """Returns the peak FLOP/s of a dtype; that of 2-byte elements for a dtype without products of its own."""
    if dtype in device.peak_flops or dtype in FOUR_BYTES:
        return device.peak_flops.get(dtype, max(device.peak_flops.values()))
    if dtype in ("fp8_block", "mxfp8", "nvfp4"):
        return gemm_rates(device, dtype).peak_flops_per_s
    return device.peak_flops[two_byte_unit(device)]


class _FastestLinks(NamedTuple):
    """Bytes per second of the fastest links of a cluster."""

    near: float
    """of a rank, on any level"""
    far: float
    """of all ranks of a node together, out of the node; 0 if there are no other nodes"""


@lru_cache(maxsize=256)
def _fastest_links(cluster: Cluster) -> _FastestLinks:
    rates = [link.bytes_per_s for link in cluster.links]
    return _FastestLinks(max(rates), max(rates[1:], default=0.0) * cluster.node_size)


def _least_on_links_s(ops: OpTable, row: int, group: CommGroup, rates: _FastestLinks) -> float:
    """Returns the seconds that a rank's share of a collective takes on the busiest link that it must pass.

    Switches may add on the way, so no rank needs to send or receive more than the buffer without its own share. Between
    nodes all NICs of a node may carry the bytes that enter it. A dispatcher's own kernel sends a token once to each
    node; its least is not known here.
    """
    if group.size == 1 or ops.kernel[row]:
        return 0.0
    kind, size = int(ops.collective[row]), float(ops.bytes_comm[row])
    share = 1.0 if kind in _WHOLE else (group.size - 1) / group.size
    least = size * share / rates.near
    if group.nodes > 1 and kind != Collective.SEND_RECV and rates.far:
        across = 1.0 if kind in _WHOLE else (group.nodes - 1) / group.nodes
        exchanged = group.ranks_per_node if kind == Collective.ALL_TO_ALL else 1
        least = max(least, size * across * exchanged / rates.far)
    return least
