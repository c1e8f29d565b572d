"""Time of matrix multiplication: a padded roofline.

For `batch` products of (m, k) by (k, n), with padding of x0 waves and of k0 in depth:

    F = 2 (batch m n + x0 128 128 SM) (k + k0) / P        work, with a half-open last wave and a pipeline to fill
    F' = F (1 + d T / (T + tau)),  T = 2 batch m n k / P    long kernels slow down
    M = (operands + result) / BW
    t = t0 + (F'^o + M^o)^(1/o)                           overlap of compute and memory: none at o = 1, all at large o

It grows strictly with m, n, k and batch and is differentiable, apart from unaligned shapes, which are slower, and
never beats the roofline of the device's peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from forerun.common.units import US
from forerun.core.cost.kernel_constants import kernel_constants
from forerun.core.cost.profile import Profile, load_profile
from forerun.core.program.kinds import GemmRole
from forerun.core.program.types import F64, I64
from forerun.describe.cluster.types import Device

DGRAD, WGRAD = int(GemmRole.DGRAD), int(GemmRole.WGRAD)

DTYPE_BYTES = {
    "fp32": (4.0, 4.0),
    "tf32": (4.0, 4.0),
    "bf16": (2.0, 2.0),
    "fp16": (2.0, 2.0),
    "fp8": (1.0, 2.0),
    "fp8_block": (1.0, 2.0),
    "mxfp8": (1.03125, 2.0),
    "nvfp4": (0.5625, 2.0),
}
"""dtype -> bytes of an operand's and of a result's element; block scales included"""
_CONSTANTS_OF = {"fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp8"}
_PEAK_OF = {"fp8_block": "fp8", "mxfp8": "fp8"}


@dataclass(frozen=True, slots=True)
class GemmRates:
    """Constants of one dtype on one device, in seconds, bytes and FLOP/s."""

    flops_per_s: float
    peak_flops_per_s: float
    bytes_per_s: float
    launch_s: float
    wave_outputs: float
    depth_pad: float
    slowdown: float
    slowdown_tau_s: float
    overlap: float
    odd_rows: float
    quant_passes: float
    input_bytes: float
    output_bytes: float
    dgrad_rate: float
    wgrad_rate: float
    accumulate_exposed: float
    unaligned: float = 0.0


@lru_cache(maxsize=256)
def gemm_rates(device: Device, dtype: str, profile: Profile | None = None) -> GemmRates:
    """Returns the constants of `dtype` on `device`; `profile` replaces the device's own.

    A device without bf16 runs it at the rate of fp16, and one without tf32 runs fp32, as libraries do. Dtypes that were
    not measured reach the same fraction of their peak as bf16 (mxfp8 and nvfp4: as fp8, where the profile has it).

    Raises:
        ForerunError: the device has no matrix unit of `dtype`.
    """
    profile = profile or load_profile(device.cost_profile)
    dtype = _in_place_of_tf32(device, dtype)
    unit = _PEAK_OF.get(dtype, dtype)
    peak = device.peak("fp16" if unit == "bf16" and unit not in device.peak_flops else unit)
    wanted = dtype if dtype in profile.gemm else _CONSTANTS_OF.get(dtype, dtype)
    measured = wanted if wanted in profile.gemm else "bf16"
    entry, roles = profile.gemm[measured], profile.gemm_roles
    input_bytes, output_bytes = DTYPE_BYTES[dtype]
    return GemmRates(
        flops_per_s=entry.p_tflops / profile.reference.peak_tflops[measured] * peak,
        peak_flops_per_s=peak,
        bytes_per_s=entry.hbm_gb_s / profile.reference.hbm_gb_s * device.memory_bytes_per_s,
        launch_s=entry.launch_us * US,
        wave_outputs=entry.wave_fraction * kernel_constants().gemm.tile_outputs * device.multiprocessors,
        depth_pad=entry.depth_pad,
        slowdown=entry.slowdown,
        slowdown_tau_s=entry.slowdown_tau_us * US,
        overlap=entry.overlap,
        odd_rows=entry.odd_rows,
        quant_passes=entry.quant_passes,
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        dgrad_rate=roles.dgrad_rate / (1.0 + entry.gradient_slowdown),
        wgrad_rate=(entry.own_wgrad_rate or roles.wgrad_rate) / (1.0 + entry.gradient_slowdown),
        accumulate_exposed=roles.accumulate_exposed,
        unaligned=roles.unaligned if input_bytes == 2.0 else 0.0,
    )


def _in_place_of_tf32(device: Device, dtype: str) -> str:
    return "fp32" if dtype == "tf32" and dtype not in device.peak_flops else dtype


def gemm_s(
    m: F64 | I64,
    n: F64 | I64,
    k: F64 | I64,
    rates: GemmRates,
    batch: F64 | I64 | float = 1.0,
    role: I64 | int = 0,
    accumulate_bytes: F64 | I64 | float = 0.0,
    speed: float = 1.0,
    kernels: F64 | I64 | float = 1.0,
    pads: npt.NDArray[np.bool_] | bool = False,
) -> F64:
    """Returns the seconds of `batch` products of (m, k) by (k, n); arrays broadcast.

    `kernels` is the number of kernels, each with a last wave: 1 for a batched product, `batch` for a grouped one.

    `role` is 0 forward, 1 dgrad, 2 wgrad. `accumulate_bytes` is the element size of a buffer that the result is added
    to, 0 if it is stored. `speed` multiplies the compute rate (sustained clocks, rates of a software stack), which
    never passes the peak. Where `pads` is true, as in TorchInductor, unaligned operands are first copied into
    aligned ones if that is faster by more than a tenth (torch/_inductor/fx_passes/pad_mm.py, `is_padded_faster`).
    """
    constants = kernel_constants().gemm
    m, n, k = np.asarray(m, np.float64), np.asarray(n, np.float64), np.asarray(k, np.float64)
    role = np.asarray(role)
    by_role = np.where(role == WGRAD, rates.wgrad_rate, np.where(role == DGRAD, rates.dgrad_rate, 1.0))
    rate = np.minimum(rates.flops_per_s * speed * by_role, rates.peak_flops_per_s)
    result = batch * m * n
    ideal = 2.0 * result * k / rate
    compute = 2.0 * (result + rates.wave_outputs * kernels) * (k + rates.depth_pad) / rate
    compute = compute * (1.0 + rates.slowdown * ideal / (ideal + rates.slowdown_tau_s))
    if rates.odd_rows:
        compute = compute * (1.0 + rates.odd_rows * (m % constants.aligned_rows != 0))
    accumulate = np.asarray(accumulate_bytes, np.float64)
    operands = batch * (m + n) * k * rates.input_bytes
    stored = result * np.where(accumulate > 0, 0.0, rates.output_bytes)
    added = 2.0 * result * accumulate / rates.bytes_per_s
    exposed = rates.accumulate_exposed * added
    memory = (operands + stored) / rates.bytes_per_s + (added - exposed)
    quantised = rates.quant_passes * 3.0 * batch * m * k / rates.bytes_per_s
    time = overlapped_s(compute, memory, rates)
    if rates.unaligned:  # operands of a weight gradient have rows of m and n elements, others rows of k
        step, row = constants.aligned_bytes / rates.input_bytes, np.where(role == WGRAD, m, k)
        slow = (1.0 + rates.unaligned * ((n % step != 0) | (row % step != 0))) * time
        padded = time + 2.0 * operands / rates.bytes_per_s
        time = np.where(pads & (slow > constants.padding_gain * padded), padded, slow)
    whole: F64 = rates.launch_s + time + exposed + quantised
    return whole


def overlapped_s(compute_s: F64, memory_s: F64, rates: GemmRates) -> F64:
    """Returns the seconds of a kernel whose compute and memory time overlap as far as the device's kernels do."""
    time: F64 = (compute_s**rates.overlap + memory_s**rates.overlap) ** (1.0 / rates.overlap)
    return time
