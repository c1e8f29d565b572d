"""The clock that a power limit leaves to a long training step.

A GPU that multiplies matrices at its full clock draws more than its limit W, and lowers the clock until it draws W.
Short kernel benchmarks don't show that, and long ones do. With x the clock of a step over that of a short benchmark,

    W = idle + D x^e,  D = energy of a FLOP * FLOP/s at x = 1

Kernels of all kinds run at that clock, because the limit applies to the mean over some tens of milliseconds, and in
such a period a step of a large model runs little else than matrix products.

Equal GPUs differ in the power that their chips draw, and so in that clock. GPUs that train together wait for the
slowest one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import TypeVar

from forerun.common.shipped import shipped
from forerun.core.cost.attention import AttentionRates, attention_rates
from forerun.core.cost.gemm import GemmRates, gemm_rates
from forerun.core.cost.profile import load_profile
from forerun.describe.cluster.types import Device

_PICO = 1e-12
_FEWEST = 2
_STANDS_FOR_ALL = "bf16"
_UNIT_OF = {"fp8_block": "fp8", "mxfp8": "fp8"}

Rates = TypeVar("Rates", GemmRates, AttentionRates)


@dataclass(frozen=True)
class Draw:
    """The power that GPUs of one architecture draw; units are in the names."""

    idle_w: float
    pj_per_flop: dict[str, float] = field(hash=False)
    source: str


@dataclass(frozen=True)
class PowerConstants:
    """All constants of power.yaml."""

    exponent: float
    """power of the clock with which dynamic power grows"""
    least_clock: float
    """lowest clock over the highest one"""
    spread: float
    """standard deviation of the clocks of equal GPUs, over their mean"""
    architectures: dict[str, Draw] = field(hash=False)
    source: str


def power_constants() -> PowerConstants:
    """Returns the constants that the package ships."""
    return shipped(PowerConstants, "forerun.core.cost", "power.yaml")


def is_known(device: Device) -> bool:
    """Returns whether the power of GPUs of the device's architecture is measured."""
    return device.architecture in power_constants().architectures


def slows_long_kernels(device: Device) -> bool:
    """Returns whether a longer product or attention kernel is slower for each FLOP than a shorter one in a step."""
    profile = load_profile(device.cost_profile)
    slowdowns = [entry.slowdown for entry in profile.gemm.values()]
    slowdowns += [entry.slowdown for entry in profile.attention.head_dim.values()]
    return not is_known(device) and max(slowdowns) > 0


def clock(device: Device, dtype: str) -> float | None:
    """Returns the clock of a long step over that of a short benchmark, at most 1; None if `is_known` is false.

    A dtype without an energy in the file runs at the clock of bf16. A device without 2-byte matrix units runs at full
    clock.
    """
    constants = power_constants()
    draw = constants.architectures.get(device.architecture)
    if draw is None:
        return None
    unit = dtype if dtype in draw.pj_per_flop and dtype in device.peak_flops else _STANDS_FOR_ALL
    if unit == _STANDS_FOR_ALL and not device.peak_flops.keys() & {"bf16", "fp16"}:
        return 1.0
    product_w = draw.pj_per_flop[unit] * _PICO * gemm_rates(device, unit).flops_per_s
    left = max(device.power_w - draw.idle_w, 0.0) / product_w
    return min(1.0, max(constants.least_clock, float(left ** (1.0 / constants.exponent))))


@lru_cache(maxsize=256)
def slowest_clock(n_gpus: int) -> float:
    """Returns the clock of the slowest of `n_gpus` equal GPUs over their mean: 1 for one GPU, 0.94 for 400.

    Clocks are normally distributed; the least of n lies at the quantile (n - 3/8) / (n + 1/4) (G. Blom, 1958).
    """
    if n_gpus < _FEWEST:
        return 1.0
    deviations = NormalDist().inv_cdf((n_gpus - 0.375) / (n_gpus + 0.25))
    return 1.0 / (1.0 + power_constants().spread * deviations)


@lru_cache(maxsize=256)
def gemm_in_steps(device: Device, dtype: str) -> tuple[GemmRates, float]:
    """Returns the constants of products in a long step, and the factor on their rate.

    The clock replaces the slowdown of long kernels in benchmarks, which is the same throttling seen from there.
    """
    return _in_steps(gemm_rates(device, dtype), device, _UNIT_OF.get(dtype, dtype))


@lru_cache(maxsize=1024)
def attention_in_steps(device: Device, kernel: str, head_dim: int, dtype: str = "bf16") -> tuple[AttentionRates, float]:
    """Returns the constants of an attention kernel in a long step, and the factor on its rate (`gemm_in_steps`).

    Raises UnknownName if there is no such fused kernel.
    """
    return _in_steps(attention_rates(device, kernel, head_dim, dtype=dtype), device, _STANDS_FOR_ALL)


def _in_steps(rates: Rates, device: Device, dtype: str) -> tuple[Rates, float]:
    found = clock(device, dtype)
    if found is None:
        return rates, device.sustained
    return replace(rates, slowdown=0.0), device.sustained * found
