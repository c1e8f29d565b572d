"""Device time of every op of a Program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.cluster.types import Cluster, Device
from forerun.cost.fused_attention import attention_us, head_profile
from forerun.cost.matmul import gemm_us, wgrad_factor
from forerun.cost.device_profile import attention_kernel, common, load_profile
from forerun.network.collectives import collective_us, p2p_us
from forerun.program.groups import CommGroup
from forerun.program.types import F64, I64, Collective, OpKind, OpTable
from forerun.units import PS_PER_US

_FP8 = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4"}


@dataclass(frozen=True, slots=True)
class KernelRates:
    """What a software stack reaches of the device profile's rates."""

    gemm: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    network: float = 1.0


def durations_ps(ops: OpTable, groups: tuple[CommGroup, ...], cluster: Cluster, rates: KernelRates) -> tuple[I64, F64]:
    """Picoseconds of every op, and 1.0 where its shape lies in the calibrated range (0.0 elsewhere)."""
    device = cluster.device
    time_us = np.zeros(len(ops))
    calibrated = np.ones(len(ops))
    _gemms(ops, device, rates, time_us, calibrated)
    _attention(ops, device, rates, time_us, calibrated)
    _memory(ops, device, rates, time_us)
    _network(ops, groups, cluster, rates, time_us, calibrated)
    out = np.rint(time_us * PS_PER_US).astype(np.int64)
    delay = ops.kind == OpKind.DELAY
    out[delay] = ops.bytes_read[delay].astype(np.int64)
    return out, calibrated


def matmul_rate(device: Device, dtype: str) -> float:
    """FLOP/s that large products in `dtype` reach at the clock at which the profile was measured."""
    profile, constants = load_profile(device.cost_profile).gemm, common()
    if dtype == "fp32":
        return device.peak("fp32") * constants.simt_peak_fraction
    if dtype in _FP8:
        return device.peak(_FP8[dtype]) * profile.fp8_peak_fraction
    wanted = dtype if dtype in device.peak_flops or dtype != "bf16" else "fp16"
    return device.peak(wanted) * profile.peak_fraction


def _gemms(ops: OpTable, device: Device, rates: KernelRates, time_us: F64, calibrated: F64) -> None:
    rows = np.flatnonzero(ops.kind == OpKind.GEMM)
    if not len(rows):
        return
    profile, constants = load_profile(device.cost_profile).gemm, common()
    m, n, k, batch, role = ops.dims[rows, :5].astype(np.float64).T
    by_dtype = {dtype: matmul_rate(device, dtype) for dtype in {ops.dtype[row] for row in rows}}
    speed = device.sustained * rates.gemm
    rate = np.array([by_dtype[ops.dtype[row]] for row in rows]) * speed
    bandwidth = device.memory_bytes_per_s * profile.memory_fraction / 1e6
    accumulate = ops.dims[rows, 5] * batch * m * n * 2
    traffic = (ops.bytes_read[rows] + ops.bytes_written[rows] - accumulate) / bandwidth
    time = gemm_us(m, n, k, batch, rate, profile, device.multiprocessors, traffic) * wgrad_factor(role, constants)
    time_us[rows] = time + constants.accumulate_exposed * accumulate / bandwidth
    calibrated[rows] = (np.minimum(np.minimum(m, n), k) >= 64) & (np.maximum(n, k) <= 65536) & (batch == 1)


def _attention(ops: OpTable, device: Device, rates: KernelRates, time_us: F64, calibrated: F64) -> None:
    rows = np.flatnonzero(ops.kind == OpKind.ATTENTION)
    if not len(rows):
        return
    profile, constants = load_profile(device.cost_profile).attention, common()
    dims = ops.dims[rows].astype(np.float64)
    head = head_profile(profile, int(dims[0, 5]))
    peak = device.peak("bf16" if "bf16" in device.peak_flops else "fp16")
    kernels = [attention_kernel(ops.dtype[row], device.architecture) for row in rows]
    forward = np.array([kernel.forward for kernel in kernels])
    backward = np.array([kernel.backward for kernel in kernels])
    speed = peak * head.peak_fraction * device.sustained * rates.attention
    rate = speed * forward * np.where(dims[:, 7] > 0, backward, 1.0)
    bandwidth = device.memory_bytes_per_s * constants.memory_fraction / 1e6
    traffic = (ops.bytes_read[rows] + ops.bytes_written[rows]) / bandwidth
    time_us[rows] = attention_us(dims, rate, head, constants, device.multiprocessors, traffic)
    calibrated[rows] = (dims[:, 3] >= 128) & np.isin(dims[:, 5], list(profile.head_dims))


def _memory(ops: OpTable, device: Device, rates: KernelRates, time_us: F64) -> None:
    rows = np.flatnonzero(ops.kind == OpKind.MEMORY)
    constants = common()
    bandwidth = device.memory_bytes_per_s * constants.memory_fraction * rates.memory / 1e6
    traffic = (ops.bytes_read[rows] + ops.bytes_written[rows]) / bandwidth
    time_us[rows] = constants.memory_launch_us * ops.launches[rows] + traffic


def _network(
    ops: OpTable, groups: tuple[CommGroup, ...], cluster: Cluster, rates: KernelRates, time_us: F64, calibrated: F64
) -> None:
    for row in np.flatnonzero(ops.kind == OpKind.COLLECTIVE).tolist():
        group = groups[ops.group[row]]
        kind = Collective(int(ops.collective[row]))
        time_us[row] = collective_us(kind, float(ops.bytes_comm[row]) / rates.network, group, cluster)
        calibrated[row] = group.nodes == 1
    for row in np.flatnonzero(ops.kind == OpKind.P2P).tolist():
        time_us[row] = p2p_us(float(ops.bytes_comm[row]) / rates.network, groups[ops.group[row]], cluster)
        calibrated[row] = 0.0
    copies = np.flatnonzero(ops.kind == OpKind.HOST_COPY)
    time_us[copies] = ops.bytes_comm[copies] / (cluster.host_bytes_per_s * common().host_copy_fraction) * 1e6
