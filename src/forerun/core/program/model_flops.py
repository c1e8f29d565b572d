"""The FLOPs of a Program as MFU and HFU count them."""

from __future__ import annotations

import numpy as np

from forerun.core.program.kinds import ATTENTION_BACKWARD_FLOPS
from forerun.core.program.types import F64, I64, OpTable, Program

_PALM_BACKWARD = 2.0


def counted_flops(program: Program, counts: I64) -> float:
    """Returns the FLOPs of matrix products, attention and recurrences, mean over ranks.

    `counts` (n_classes, n_ops) says how often each rank class of `program` runs each op. Attention counts as if nothing
    were masked, and its backward pass at twice the forward's (PaLM, app. B).
    """
    if not counts.any():
        return 0.0
    ranks = np.array([cls.n_ranks for cls in program.rank_classes], np.float64)
    per_class = counts @ (program.ops.flops * _counted(program.ops))
    return float((per_class * ranks).sum() / ranks.sum())


def _counted(ops: OpTable) -> F64:
    """Returns counted FLOPs over executed FLOPs of every op, (n_ops,): 1 for matrix products, 0 for memory-bound
    kernels.

    For attention the two differ: kernels leave out half of the square under a causal mask, and fused backward kernels
    execute 2.5 times the FLOPs of the forward kernel.
    """
    share: F64 = ops.is_gemm.astype(np.float64)
    rows = np.flatnonzero(ops.is_attention)
    of = ops.attention(rows)
    pairs = np.maximum(1.0, of.seq_q * of.seq_kv)
    run = pairs - np.where(of.causal, 0.5 * np.minimum(of.seq_q, of.seq_kv) ** 2, 0.0)
    scans = np.flatnonzero(ops.is_scan)
    share[scans] = np.where(ops.scan(scans).backward, _PALM_BACKWARD / ATTENTION_BACKWARD_FLOPS, 1.0)
    share[rows] = pairs / run * np.where(of.backward, _PALM_BACKWARD / ATTENTION_BACKWARD_FLOPS, 1.0)
    return share
