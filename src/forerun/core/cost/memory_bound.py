"""Time of memory-bound kernels and host copies: a launch time plus bytes over a bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forerun.common.units import US
from forerun.core.cost.profile import Profile, load_profile
from forerun.core.program.types import F64, I16, I64
from forerun.describe.cluster.types import Device


@dataclass(frozen=True, slots=True)
class MemoryRates:
    """Rates of memory-bound kernels on the device, and of its copy engine as a share of the host link."""

    bytes_per_s: float
    peak_bytes_per_s: float
    launch_s: float
    host_fraction: float
    host_launch_s: float


@lru_cache(maxsize=256)
def memory_rates(device: Device, profile: Profile | None = None) -> MemoryRates:
    """Returns the rates of `device`; `profile` replaces the device's own."""
    profile = profile or load_profile(device.cost_profile)
    return MemoryRates(
        bytes_per_s=profile.memory_bound.hbm_fraction * device.memory_bytes_per_s,
        peak_bytes_per_s=device.memory_bytes_per_s,
        launch_s=profile.memory_bound.launch_us * US,
        host_fraction=profile.host_copy.link_fraction,
        host_launch_s=profile.host_copy.launch_us * US,
    )


def memory_bound_s(
    size_bytes: F64, launches: F64 | I64 | I16 | float, rates: MemoryRates, speed: F64 | float = 1.0
) -> F64:
    """Returns the seconds of `launches` kernels that together move `size_bytes`; `speed` multiplies the bandwidth."""
    time: F64 = launches * rates.launch_s + size_bytes / np.minimum(rates.bytes_per_s * speed, rates.peak_bytes_per_s)
    return time


def host_copy_s(size_bytes: F64, host_bytes_per_s: float, rates: MemoryRates) -> F64:
    """Returns the seconds of copies between device and pinned host memory over a link of `host_bytes_per_s`."""
    time: F64 = rates.host_launch_s + size_bytes / (rates.host_fraction * host_bytes_per_s)
    return time
