"""Times of the rows of an op table; one call of a kernel model computes the times of all rows of its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import PS_PER_S
from forerun.core.cost.attention import FOUR_BYTES, attention_s, two_byte_unit
from forerun.core.cost.clock import attention_in_steps, gemm_in_steps
from forerun.core.cost.convolution import convolution_s
from forerun.core.cost.gemm import gemm_s
from forerun.core.cost.kernel_constants import kernel_constants
from forerun.core.cost.memory_bound import host_copy_s, memory_bound_s, memory_rates
from forerun.core.cost.profile import load_profile
from forerun.core.cost.scan import scan_rates
from forerun.core.network.lines import smooth_minimum_s
from forerun.core.network.nccl import collective_lines, measured_in_node
from forerun.core.network.network_file import Network
from forerun.core.network.on_topology import OnTopology
from forerun.core.network.token_exchange import exchange_of, sent_share
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import F64, I64, Collective, OpTable
from forerun.describe.cluster.types import Cluster, Device, KernelRates

_LONGEST_S = 4e6
"""picoseconds of a longer time leave 64 bits"""


def on_topology(network: Network, cluster: Cluster, n_gpus: int) -> OnTopology:
    """Prepares the collectives of `n_gpus` of `cluster` on `network`."""
    return OnTopology(network, n_gpus, cluster, load_profile(cluster.device.cost_profile).collectives)


@dataclass(frozen=True, slots=True)
class _Run:
    """The hardware and the rates that the ops of a table run with."""

    groups: Sequence[CommGroup]
    cluster: Cluster
    rates: KernelRates
    network: OnTopology | None
    padded: Sequence[int]

    @property
    def device(self) -> Device:
        return self.cluster.device


def durations_ps(
    ops: OpTable,
    groups: Sequence[CommGroup],
    cluster: Cluster,
    rates: KernelRates,
    network: OnTopology | None = None,
    padded: Sequence[int] = (),
) -> tuple[I64, F64]:
    """Returns picoseconds of every row, and 1 if its shape lies in the measured range of a measured device, else 0.

    The power limit and `device.sustained` slow matrix multiplications and attention (cost/clock.py). Fixed delays count
    as measured. With `network` collectives run on it in place of the links of the cluster, and none of them counts as
    measured. `padded` rows are products that TorchInductor may pad.

    Raises:
        ForerunError: a dtype that the device lacks, an unknown attention kernel, a group that no link joins, a network
            with fewer NPUs than the run has GPUs.
    """
    run = _Run(groups, cluster, rates, network, padded)
    time_s, covered = np.zeros(len(ops)), np.ones(len(ops))
    for kind in np.flatnonzero(np.bincount(ops.kind, minlength=len(OpKind))).tolist():
        rows = np.flatnonzero(ops.kind == kind)
        time_s[rows], covered[rows] = _COSTS[kind](ops, rows, run)
    if not load_profile(cluster.device.cost_profile).calibrated:
        covered[~ops.is_delay] = 0.0
    beyond = np.flatnonzero(~(time_s < _LONGEST_S))
    if len(beyond):
        raise ForerunError(
            f"{ops.name[beyond[0]]} takes {time_s[beyond[0]]:.3g} s on {cluster.name}; at most {_LONGEST_S:.3g} s are"
            " simulated; are the sizes of the model and the plan, and the rates of the cluster right?"
        )
    return np.rint(time_s * PS_PER_S).astype(np.int64), covered


_Costs = tuple[F64, F64 | float]
"""seconds of rows, and 1 if their shapes were measured, else 0"""


def _same(values: Sequence[str], rows: I64) -> dict[str, I64]:
    """Groups the places in `rows` by the entry of `values` that each row has."""
    found: dict[str, list[int]] = {}
    for place, row in enumerate(rows.tolist()):
        found.setdefault(values[row], []).append(place)
    return {value: np.array(places) for value, places in found.items()}


def _gemms(ops: OpTable, rows: I64, run: _Run) -> _Costs:
    time_s = np.zeros(len(rows))
    pads = np.zeros(len(ops), np.bool_)
    pads[list(run.padded)] = True
    for dtype, places in _same(ops.dtype, rows).items():
        constants, clock = gemm_in_steps(run.device, dtype)
        speed, implicit = clock * run.rates.gemm, ops.gemm(rows[places]).operand_bytes > 0
        if implicit.any():
            convolutions, places = places[implicit], places[~implicit]
            time_s[convolutions] = convolution_s(ops.gemm(rows[convolutions]), constants, speed)
        of = ops.gemm(rows[places])
        sizes = (of.m, of.n, of.k, constants, of.batch.astype(np.float64), of.role, of.accumulate_bytes)
        time_s[places] = gemm_s(*sizes, speed, of.kernels, pads[rows[places]])
    every = ops.gemm(rows)
    return time_s, _within(kernel_constants().gemm.calibrated_sizes, every.m, every.n, every.k)


def _attention(ops: OpTable, rows: I64, run: _Run) -> _Costs:
    time_s, covered, rates = np.zeros(len(rows)), np.zeros(len(rows)), run.rates
    dims, alike = ops.attention(rows).head_dim.tolist(), dict[tuple[str, int, str], list[int]]()
    for place, row in enumerate(rows.tolist()):
        dtype = ops.dtype[row] if ops.dtype[row] in FOUR_BYTES else "bf16"
        alike.setdefault((ops.kernel[row], dims[place], dtype), []).append(place)
    for (kernel, head_dim, dtype), some in alike.items():
        places = np.array(some)
        constants, clock = attention_in_steps(run.device, kernel, head_dim, dtype)
        shape = ops.attention(rows[places])
        speed = clock * rates.attention * np.where(shape.backward, rates.attention_backward, 1.0)
        time_s[places] = attention_s(shape, constants, speed)
        covered[places] = (
            _within(kernel_constants().attention.calibrated_lengths, shape.seq_q, shape.seq_kv) * constants.calibrated
        )
    return time_s, covered


def _within(measured: tuple[int, int], *sizes: I64) -> F64:
    """Returns 1 if all `sizes` are in the range `measured`, else 0."""
    inside = (np.minimum.reduce(sizes) >= measured[0]) & (np.maximum.reduce(sizes) <= measured[1])
    return np.asarray(inside, np.float64)


def _scans(ops: OpTable, rows: I64, run: _Run) -> _Costs:
    device = run.device
    peaks = {dtype: _peak_of_scans(device, dtype) for dtype in {ops.dtype[row] for row in rows.tolist()}}
    rates = [scan_rates(ops.kernel[row]).on(device.architecture) * peaks[ops.dtype[row]] for row in rows.tolist()]
    rate = np.array(rates) * run.rates.attention
    moved = ops.bytes_read[rows] + ops.bytes_written[rows]
    memory = memory_rates(run.device)
    traffic = memory_bound_s(moved, ops.launches[rows], memory, run.rates.memory)
    return np.maximum(ops.flops[rows] / rate + ops.launches[rows] * memory.launch_s, traffic), 0.0


def _peak_of_scans(device: Device, dtype: str) -> float:
    """Returns the peak of the matrix unit that a recurrence's products run on: tf32's for operands of 4 bytes."""
    if dtype not in FOUR_BYTES:
        return device.peak(two_byte_unit(device))
    return device.peak("tf32" if "tf32" in device.peak_flops else "fp32")


def _memory_bound(ops: OpTable, rows: I64, run: _Run) -> _Costs:
    size = ops.bytes_read[rows] + ops.bytes_written[rows]
    shares = kernel_constants().memory_bound
    rate = np.array([shares.rate(ops.kernel[row]) for row in rows.tolist()])
    return memory_bound_s(size, ops.launches[rows], memory_rates(run.device), run.rates.memory * rate), 1.0


def _host_copies(ops: OpTable, rows: I64, run: _Run) -> _Costs:
    return host_copy_s(ops.bytes_comm[rows], run.cluster.host_bytes_per_s, memory_rates(run.device)), 1.0


def _delays(ops: OpTable, rows: I64, run: _Run) -> _Costs:
    return ops.delay(rows).duration_ps / PS_PER_S, 1.0


_Row = tuple[list[float], list[float], float]


@lru_cache(maxsize=256)
def _line_table(cluster: Cluster, network: OnTopology | None) -> dict[tuple[int, ...], _Row]:
    """Returns the cache of `_line_row` for one cluster: (collective, layout of the group) -> row.

    `_collectives` fills it, so that all Programs on the cluster look up a collective once.
    """
    return {}


def _line_row(kind: int, group: CommGroup, cluster: Cluster, network: OnTopology | None) -> _Row:
    if network is not None:
        latency, slope = network.lines(Collective(kind), group).columns()
        return latency, slope, float(group.size == 1)
    measured = load_profile(cluster.device.cost_profile).collectives
    latency, slope = collective_lines(Collective(kind), group.nodes, group.ranks_per_node, cluster, measured).columns()
    known = group.size == 1 or (
        measured_in_node(cluster, measured)
        and group.nodes == 1
        and group.size <= kernel_constants().collectives.calibrated_ranks
    )
    return latency, slope, float(known)


def _collectives(ops: OpTable, rows: I64, run: _Run) -> _Costs:
    table, network = _line_table(run.cluster, run.network), run.network
    found: list[_Row] = []
    for kind, number in zip(ops.collective[rows].tolist(), ops.group[rows].tolist(), strict=True):
        group = run.groups[number]
        key: tuple[int, ...] = (kind, group.nodes, group.ranks_per_node)
        if network is not None:
            key += (group.inner, group.borders)
        if key not in table:
            table[key] = _line_row(kind, group, run.cluster, network)
        found.append(table[key])
    latency, slope, known = zip(*found, strict=True)
    size, own = ops.bytes_comm[rows], np.array([ops.kernel[row] != "" for row in rows.tolist()], np.bool_)
    if network is not None:
        size[own] *= [sent_share(ops, row, run.groups) for row in rows[own].tolist()]
    time_s = smooth_minimum_s(np.array(latency), np.array(slope), size) / run.rates.network
    if network is None and own.any():  # a dispatcher's kernels, which a stack's rate of NCCL does not describe
        times = [exchange_of(ops, row, run.groups, run.cluster) for row in rows[own].tolist()]
        time_s[own] = [time.latency_s for time in times] + size[own] * [time.s_per_byte for time in times]
        time_s[own] /= run.cluster.rates.network
    return time_s, np.array(known)


_COSTS: dict[int, Callable[[OpTable, I64, _Run], _Costs]] = {
    OpKind.GEMM: _gemms,
    OpKind.ATTENTION: _attention,
    OpKind.MEMORY: _memory_bound,
    OpKind.COLLECTIVE: _collectives,
    OpKind.P2P: _collectives,
    OpKind.HOST_COPY: _host_copies,
    OpKind.DELAY: _delays,
    OpKind.SCAN: _scans,
}
"""function that prices the rows of each kind"""
