"""A device that does not exist: files of measurements that known constants and a little noise made."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forerun.core.cost.attention import attention_s
from forerun.core.cost.gemm import gemm_s
from forerun.core.cost.profile import AttentionEntry, GemmEntry
from forerun.core.network.constants import NodeOp
from forerun.core.program.types import Collective
from forerun.evidence.measure.fit import Peaks, attention_constants, attention_shapes, collective_s, gemm_constants

PEAKS = Peaks(tflops=989.4, hbm_gb_s=3350, multiprocessors=132)
"""those of the H100 SXM"""
GEMM = GemmEntry(700, 2500, 4.0, 0.15, 110, 0.1, 900, "made up")
HEAD = AttentionEntry(500, 300, 9, 0.3)
OP = NodeOp(6.0, 1.2, 6.0, 1.5, 180, 15.0, 1.0, 340, 0.4)
HBM_SHARE, HBM_LAUNCH_US = 0.7, 2.5
HOST_SHARE, HOST_LAUNCH_US = 0.75, 9.0
WGRAD = 0.9
NOISE = 0.01


def wobble(count: int, seed: int) -> np.ndarray:
    return np.exp(NOISE * np.random.default_rng(seed).standard_normal(count))


def write_kernels(path: Path) -> Path:
    """A CSV file of products in three layouts, attention, memory-bound kernels and host copies."""
    size = np.array([256, 512, 1024, 2048, 4096, 8192, 16384])
    m, n, k = (axis.ravel().astype(float) for axis in np.meshgrid(size, size, size))
    rates = gemm_constants(GEMM, PEAKS)
    lines = ["kind,dtype,m,n,k,layout,batch,heads,kv_heads,seq_q,seq_kv,head_dim,causal,backward,kernel,bytes,time_us"]
    for layout, speed in (("forward", 1.0), ("dgrad", 1.0), ("wgrad", WGRAD)):
        time_us = gemm_s(m, n, k, rates, speed=speed) * 1e6 * wobble(len(m), len(layout))
        lines += [
            f"gemm,bf16,{a:.0f},{b:.0f},{c:.0f},{layout},,,,,,,,,,,{t!r}"
            for a, b, c, t in zip(m, n, k, time_us.tolist(), strict=True)
        ]
    batch, seq, heads = (
        x.ravel().astype(float) for x in np.meshgrid([1, 2, 8], [512, 2048, 8192], [8, 16, 32, 64, 96])
    )
    shape = {"batch": batch, "seq": seq, "heads": heads, "kv_heads": heads, "head_dim": np.full(len(seq), 128.0)}
    for backward, rate in ((0, 1.0), (1, 0.8)):
        shapes = attention_shapes(shape | {"backward": np.full(len(seq), float(backward))})
        time_us = attention_s(shapes, attention_constants(HEAD, PEAKS), rate) * 1e6 * wobble(len(seq), 7)
        lines += [
            f"attention,,,,,,{b:.0f},{h:.0f},{h:.0f},{s:.0f},{s:.0f},128,1,{backward},flash3,,{t!r}"
            for b, h, s, t in zip(batch, heads, seq, time_us.tolist(), strict=True)
        ]
    moved = 2.0 ** np.arange(12, 31)
    memory_us = HBM_LAUNCH_US + moved / (HBM_SHARE * 3350e9) * 1e6
    host_us = HOST_LAUNCH_US + moved / (HOST_SHARE * 64e9) * 1e6
    for kind, times in (("memory", memory_us), ("host_copy", host_us)):
        lines += [f"{kind}" + "," * 15 + f"{b:.0f},{t!r}" for b, t in zip(moved, times.tolist(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_all_gathers(path: Path) -> Path:
    """A CSV file of all-gathers among 2, 4 and 8 GPUs, and one between nodes."""
    ranks, size = (x.ravel().astype(float) for x in np.meshgrid([2, 4, 8], 2.0 ** np.arange(10, 31)))
    time_us = collective_s(Collective.ALL_GATHER, OP, ranks, size) * 1e6 * wobble(len(ranks), 3)
    lines = ["collective,ranks,bytes,time_us", "all_gather,16,1024,50"]
    lines += [f"all_gather,{r:.0f},{b:.0f},{t!r}" for r, b, t in zip(ranks, size, time_us.tolist(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path
