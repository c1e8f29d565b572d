"""Time of fused attention kernels.

Forward, after the form fitted to measured causal kernels: work of all row blocks of 128 queries, each with `keys` extra
keys, plus the part of the longest row block that runs alone at the end, joined with the memory time by a 4-norm:

  all = 2 b H s_q (D + D_v) (pairs / s_q + c) / P
  one = L 2 128 (D + D_v) (s_kv + c) SM / P
  t   = t0 + ((all + one)^4 + M^4)^(1/4)

Backward runs 2.5 times the FLOPs at a fraction of the forward rate.
"""

from __future__ import annotations

import numpy as np

from forerun.cost.device_profile import AttentionProfile, Common, HeadProfile
from forerun.program.types import F64


def head_profile(profile: AttentionProfile, head_dim: int) -> HeadProfile:
    """Constants of the calibrated head size nearest to `head_dim`."""
    nearest = min(profile.head_dims, key=lambda size: (abs(size - head_dim), size))
    return profile.head_dims[nearest]


def attention_us(
    dims: F64, rate: F64, head: HeadProfile, constants: Common, multiprocessors: int, traffic_us: F64
) -> F64:
    """Microseconds of attention kernels with the `dims` of OpTable rows, (n, 9).

    `rate` is FLOP/s of each row's kernel and direction.
    """
    batch, heads, _, seq_q, seq_kv, head_dim, causal, backward, v_dim = dims.T
    widths = head_dim + v_dim
    square = np.minimum(seq_q, seq_kv)
    keys = seq_kv - causal * 0.5 * square * square / seq_q
    flops = 2.0 * widths * np.where(backward > 0, constants.backward_flops_ratio, 1.0)
    per_us = rate / 1e6
    every = batch * heads * np.ceil(seq_q / 128) * 128 * flops * (keys + head.keys) / per_us
    longest = head.tail * 128 * flops * (seq_kv + head.keys) * multiprocessors / per_us
    misaligned = np.where(head_dim % 16 > 0, 1 + constants.misaligned_head_penalty, 1.0)
    return np.asarray(head.launch_us + (((every + longest) * misaligned) ** 4 + traffic_us**4) ** 0.25)
