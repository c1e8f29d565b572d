"""Time of matrix multiplications: a roofline padded for waves and pipeline fill.

  F  = 2 (m n + x0 128 128 SM) (k + k0) / P        compute, padded by x0 waves and k0 of depth
  F' = F (1 + d T / (T + tau)),  T = 2 m n k / P   long kernels run slower
  M  = bytes / BW                                   operands and result once
  t  = t0 + (F'^3 + M^3)^(1/3)                      smooth maximum

Strictly increasing in m, n, k; never faster than the roofline of P and BW.
"""

from __future__ import annotations

import numpy as np

from forerun.cost.device_profile import Common, GemmProfile
from forerun.program.types import F64

_TILE = 128 * 128


def gemm_us(
    m: F64, n: F64, k: F64, batch: F64, peak_flops: F64, profile: GemmProfile, multiprocessors: int, traffic_us: F64
) -> F64:
    """Microseconds of `batch` products of (m, k) by (k, n).

    `peak_flops` is the sustained rate in FLOP/s, `traffic_us` the time of the operands and result at memory speed.
    """
    per_us = peak_flops / 1e6
    padded = 2 * (batch * m * n + profile.wave_fraction * _TILE * multiprocessors) * (k + profile.depth_pad) / per_us
    ideal = 2 * batch * m * n * k / per_us
    compute = padded * (1 + profile.slowdown * ideal / (ideal + profile.slowdown_tau_us))
    return np.asarray(profile.launch_us + np.cbrt(compute**3 + traffic_us**3))


def wgrad_factor(role: F64, constants: Common) -> F64:
    """Relative time of a product by role: weight gradients (role 2) read both operands across their rows."""
    return np.where(role == 2, 1 + constants.wgrad_slowdown, 1.0)
