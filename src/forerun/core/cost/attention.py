"""Time of fused attention kernels, which compute blocks of queries one after the other.

There are s_q queries and s_k keys; a query attends to `pairs` keys on average (s_k / 2 under a causal mask of a
square). Heads have size D in queries and keys and Dv in values:

    all = 2 b H s_q (D + Dv) (pairs + c) / P       work, c extra keys a query: diagonal, prologue, softmax tail; the
                                                   backward pass of some kernels has a larger c
    all' = all (1 + d T / (T + tau)),  T = all at c = 0    long kernels slow down, as matrix products do
    one = L 2 128 (D + Dv) (s_k + c) SM / P        exposed part of the longest block of 128 queries
    M = bytes of queries, keys, values, output over the bandwidth
    t = t0 + ((all' + one)^4 + M^4)^(1/4)

The backward pass executes 2.5 times the FLOPs (FlashAttention-2, section 4.1) at a lower rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import US
from forerun.core.cost.kernel_constants import kernel_constants
from forerun.core.cost.profile import AttentionEntry, Profile, load_profile
from forerun.core.program.kinds import ATTENTION_BACKWARD_FLOPS, Attention
from forerun.core.program.types import F64, I64
from forerun.describe.cluster.types import Device
from forerun.describe.kernels.attention import AttentionKernel, fused_kernel

FOUR_BYTES = ("fp32", "tf32")


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Constants of one kernel at one head size on one device."""

    flops_per_s: float
    peak_flops_per_s: float
    backward_rate: float
    extra_keys: float
    backward_extra_keys: float
    launch_s: float
    tail_rows: float
    """exposed queries of the longest block, times multiprocessors"""
    slowdown: float
    slowdown_tau_s: float
    bytes_per_s: float
    padded: float
    """head size that the kernel computes on divided by the real one"""
    calibrated: bool
    element_bytes: float


def two_byte_unit(device: Device) -> str:
    """Returns the dtype of the device's matrix unit for elements of 2 bytes. Returns that for fp32 if there is none."""
    return next((dtype for dtype in ("bf16", "fp16") if dtype in device.peak_flops), "fp32")


def _at(table: dict[int, AttentionEntry], head_dim: float) -> AttentionEntry:
    """Returns the constants at any head size; between calibrated sizes the time of a kernel is linear in the head size.

    Below all calibrated sizes the time stays level, as matrix units idle; above them it grows in proportion.
    """
    sizes = sorted(table)
    inside = min(head_dim, sizes[-1])

    def between(values: list[float]) -> float:
        return float(np.interp(inside, sizes, values))

    slope = [size / table[size].p_tflops for size in sizes]
    keys = [a * table[size].extra_keys for a, size in zip(slope, sizes, strict=True)]
    tail = [a * table[size].tail for a, size in zip(slope, sizes, strict=True)]
    return AttentionEntry(
        p_tflops=inside / between(slope),
        extra_keys=between(keys) / between(slope),
        launch_us=between([table[size].launch_us for size in sizes]),
        tail=between(tail) / between(slope),
        slowdown=between([table[size].slowdown for size in sizes]),
        slowdown_tau_us=between([table[size].slowdown_tau_us for size in sizes]),
    )


def four_byte_peak(device: Device, kernel: AttentionKernel, dtype: str) -> float:
    """Returns the peak of the unit on which `kernel` multiplies elements of 4 bytes, in FLOP/s."""
    if kernel.tf32_products and "tf32" in device.peak_flops:
        return device.peak("tf32") / kernel.tf32_products
    return device.peak(dtype if dtype in device.peak_flops else "fp32")  # libraries run fp32 where there is no tf32


@lru_cache(maxsize=1024)
def attention_rates(
    device: Device, kernel: str, head_dim: int, profile: Profile | None = None, dtype: str = "bf16"
) -> AttentionRates:
    """Returns the constants of `kernel` at `head_dim` on `device`; `profile` replaces the device's own.

    Kernels of 4-byte elements reach the same share of the peak of their unit as those of 2 bytes do of theirs. What a
    query takes beside its keys takes as long as with elements of 2 bytes, but for a half-filled block of keys.

    Raises:
        UnknownName: there is no such fused kernel.
        ForerunError: the device has no unit of `dtype`.
    """
    profile = profile or load_profile(device.cost_profile)
    found = fused_kernel(kernel)
    rate = profile.attention.rates.get(kernel) or found.rate_on(device.architecture)
    padded = -(-head_dim // found.head_dim_multiple) * found.head_dim_multiple
    entry = _at(profile.attention.head_dim, padded)
    forward, backward = rate.at(padded)
    if head_dim < 1:
        raise ForerunError(f"attention with heads of {head_dim} dimensions; at least 1 is needed")
    extra_keys, backward_extra_keys = rate.extra_keys_at(padded, entry.extra_keys)
    wide = dtype in FOUR_BYTES
    two_bytes = device.peak(two_byte_unit(device))
    peak = four_byte_peak(device, found, dtype) if wide else two_bytes
    if wide:
        filled = 0.5 * kernel_constants().attention.wide_block_keys
        extra_keys, backward_extra_keys = (filled + one * peak / two_bytes for one in (extra_keys, backward_extra_keys))
    return AttentionRates(
        flops_per_s=entry.p_tflops / profile.reference.peak_tflops["bf16"] * peak * forward,
        peak_flops_per_s=peak,
        backward_rate=backward,
        extra_keys=extra_keys,
        backward_extra_keys=backward_extra_keys,
        launch_s=entry.launch_us * US,
        tail_rows=entry.tail * kernel_constants().attention.block_queries * device.multiprocessors,
        slowdown=entry.slowdown,
        slowdown_tau_s=entry.slowdown_tau_us * US,
        bytes_per_s=profile.attention.hbm_fraction * device.memory_bytes_per_s,
        padded=padded / head_dim,
        calibrated=profile.calibrated and head_dim in profile.attention.head_dim and not (rate.stands_in or wide),
        element_bytes=4.0 if wide else kernel_constants().attention.element_bytes,
    )


def attention_s(shape: Attention[I64] | Attention[F64], rates: AttentionRates, speed: float | F64 = 1.0) -> F64:
    """Returns the seconds of fused attention kernels of one head size, (n,).

    A causal mask halves the square on the diagonal: pairs = s_q s_k - min(s_q, s_k)^2 / 2. `speed` multiplies the
    compute rate, which never passes the peak.
    """
    constants = kernel_constants().attention
    batch, heads, seq_q, seq_kv = shape.batch, shape.heads, shape.seq_q, shape.seq_kv
    square = np.minimum(seq_q, seq_kv)
    keys = seq_kv - (shape.causal != 0) * 0.5 * square * square / seq_q
    width = shape.head_dim + shape.v_head_dim
    is_backward = shape.backward != 0
    rate = rates.flops_per_s * np.where(is_backward, rates.backward_rate * speed, speed)
    per_pair = 2.0 * rates.padded * width * np.where(is_backward, ATTENTION_BACKWARD_FLOPS, 1.0)
    per_pair = per_pair / np.minimum(rate, rates.peak_flops_per_s)
    per_key = batch * heads * np.maximum(seq_q, constants.block_queries) * per_pair
    ideal = per_key * keys
    slower = 1.0 + rates.slowdown * ideal / (ideal + rates.slowdown_tau_s)
    extra_keys = np.where(is_backward, rates.backward_extra_keys, rates.extra_keys)
    work = per_key * (keys + extra_keys) * slower
    tail = rates.tail_rows * per_pair * (seq_kv + extra_keys)
    traffic = rates.element_bytes * batch * (seq_q * heads + seq_kv * shape.kv_heads) * width / rates.bytes_per_s
    traffic = traffic * np.where(is_backward, constants.backward_passes, 1.0)
    time: F64 = rates.launch_s + ((work + tail) ** 4 + traffic**4) ** 0.25
    return time
