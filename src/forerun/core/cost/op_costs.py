"""Durations of the rows of an op table: each kind goes to its model, all rows of a kind at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from forerun.common.units import PS_PER_S
from forerun.core.cost.attention import attention_rates, attention_s
from forerun.core.cost.convolution import convolution_s
from forerun.core.cost.gemm import gemm_rates, gemm_s
from forerun.core.cost.memory_bound import host_copy_s, memory_bound_s, memory_rates
from forerun.core.cost.profile import load_profile
from forerun.core.network.lines import smooth_minimum_s
from forerun.core.network.nccl import collective_lines, measured_in_node
from forerun.core.network.network_file import Network
from forerun.core.network.on_topology import OnTopology
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import F64, I64, Collective, OpTable
from forerun.describe.cluster.types import Cluster, Device, KernelRates

_GEMM_RANGE = (64, 65536)
_SEQ_RANGE = (128, 131072)
_MEASURED_RANKS = 8


def on_topology(network: Network, cluster: Cluster, n_gpus: int) -> OnTopology:
    """Collectives of `n_gpus` of `cluster` on `network`."""
    return OnTopology(network, n_gpus, cluster, load_profile(cluster.device.cost_profile).collectives)


def durations_ps(
    ops: OpTable,
    groups: Sequence[CommGroup],
    cluster: Cluster,
    rates: KernelRates,
    network: OnTopology | None = None,
    padded: Sequence[int] = (),
) -> tuple[I64, F64]:
    """Picoseconds of every row, and 1 where its shape lies in the measured range of a measured device, else 0.

    `device.sustained` slows matrix multiplications and attention. Fixed delays count as measured. With `network`
    collectives run on it in place of the links of the cluster, and none of them counts as measured. `padded` rows are
    products that TorchInductor may pad.

    Raises:
        ForerunError: a dtype that the device lacks, an unknown attention kernel, a group that no link joins, a network
            with fewer NPUs than the run has GPUs.
    """
    device = cluster.device
    time_s = np.zeros(len(ops))
    covered = np.ones(len(ops))
    kind = ops.kind
    for number in np.flatnonzero(np.bincount(kind, minlength=len(OpKind))).tolist():
        rows = np.flatnonzero(kind == number)
        if number == OpKind.GEMM:
            _gemms(ops, rows, device, rates, padded, time_s, covered)
        elif number == OpKind.ATTENTION:
            _attention(ops, rows, device, rates, time_s, covered)
        elif number == OpKind.MEMORY:
            size = ops.bytes_read[rows] + ops.bytes_written[rows]
            time_s[rows] = memory_bound_s(size, ops.launches[rows], memory_rates(device), rates.memory)
        elif number in (OpKind.COLLECTIVE, OpKind.P2P):
            _collectives(ops, rows, groups, cluster, network, rates.network, time_s, covered)
        elif number == OpKind.HOST_COPY:
            time_s[rows] = host_copy_s(ops.bytes_comm[rows], cluster.host_bytes_per_s, memory_rates(device))
        else:
            time_s[rows] = ops.delay(rows).duration_ps / PS_PER_S
    if not load_profile(device.cost_profile).calibrated:
        covered[~ops.is_delay] = 0.0
    return np.rint(time_s * PS_PER_S).astype(np.int64), covered


def _same(values: Sequence[str], rows: I64) -> dict[str, I64]:
    """`rows` by their entry of `values`."""
    found: dict[str, list[int]] = {}
    for row in rows.tolist():
        found.setdefault(values[row], []).append(row)
    return {value: np.array(members) for value, members in found.items()}


def _gemms(
    ops: OpTable,
    rows: I64,
    device: Device,
    rates: KernelRates,
    padded: Sequence[int],
    time_s: F64,
    covered: F64,
) -> None:
    speed = device.sustained * rates.gemm
    pads = np.zeros(len(ops), np.bool_)
    pads[list(padded)] = True
    for dtype, same in _same(ops.dtype, rows).items():
        constants, implicit = gemm_rates(device, dtype), ops.gemm(same).operand_bytes > 0
        if implicit.any():
            convolutions, same = same[implicit], same[~implicit]
            time_s[convolutions] = convolution_s(ops.gemm(convolutions), constants, speed)
        of = ops.gemm(same)
        sizes = (of.m, of.n, of.k, constants, of.batch.astype(np.float64), of.role, of.accumulate_bytes)
        time_s[same] = gemm_s(*sizes, speed, of.kernels, pads[same])
    every = ops.gemm(rows)
    covered[rows] = _within(_GEMM_RANGE, every.m, every.n, every.k)


def _within(allowed: tuple[int, int], *sizes: I64) -> npt.NDArray[np.bool_]:
    return np.asarray((np.minimum.reduce(sizes) >= allowed[0]) & (np.maximum.reduce(sizes) <= allowed[1]))


def _attention(ops: OpTable, rows: I64, device: Device, rates: KernelRates, time_s: F64, covered: F64) -> None:
    for kernel, of_kernel in _same(ops.kernel, rows).items():
        head_dims = ops.attention(of_kernel).head_dim
        for head_dim in np.unique(head_dims).tolist():
            same = of_kernel[head_dims == head_dim]
            constants, shape = attention_rates(device, kernel, head_dim), ops.attention(same)
            speed = device.sustained * rates.attention * np.where(shape.backward, rates.attention_backward, 1.0)
            time_s[same] = attention_s(shape, constants, speed)
            covered[same] = _within(_SEQ_RANGE, shape.seq_q, shape.seq_kv) & constants.calibrated


_Row = tuple[list[float], list[float], float]


@lru_cache(maxsize=256)
def _line_table(cluster: Cluster, network: OnTopology | None) -> dict[tuple[int, ...], _Row]:
    """(collective, layout of the group) -> latency and seconds per byte of its lines, and whether it was measured.

    Filled as Programs ask, so that one look at the cluster serves all collectives of a Program.
    """
    return {}


def _line_row(kind: int, group: CommGroup, cluster: Cluster, network: OnTopology | None) -> _Row:
    if network is not None:
        latency, slope = network.lines(Collective(kind), group).columns()
        return latency, slope, float(group.size == 1)
    measured = load_profile(cluster.device.cost_profile).collectives
    latency, slope = collective_lines(Collective(kind), group.nodes, group.ranks_per_node, cluster, measured).columns()
    known = group.size == 1 or (
        measured_in_node(cluster, measured) and group.nodes == 1 and group.size <= _MEASURED_RANKS
    )
    return latency, slope, float(known)


def _collectives(
    ops: OpTable,
    rows: I64,
    groups: Sequence[CommGroup],
    cluster: Cluster,
    network: OnTopology | None,
    speed: float,
    time_s: F64,
    covered: F64,
) -> None:
    table = _line_table(cluster, network)
    found: list[_Row] = []
    for kind, number in zip(ops.collective[rows].tolist(), ops.group[rows].tolist(), strict=True):
        group = groups[number]
        key: tuple[int, ...] = (kind, group.nodes, group.ranks_per_node)
        if network is not None:
            key += (group.inner, group.borders)
        if key not in table:
            table[key] = _line_row(kind, group, cluster, network)
        found.append(table[key])
    latency, slope, known = zip(*found, strict=True)
    size = ops.bytes_comm[rows]
    time_s[rows] = smooth_minimum_s(np.array(latency), np.array(slope), size) / speed
    covered[rows] = known
