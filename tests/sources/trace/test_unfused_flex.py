"""A program that calls flex_attention without torch.compile, traced, against the symbolic path."""

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

from forerun.core.memory.profile import profile  # noqa: E402
from forerun.core.program.counts import op_counts  # noqa: E402
from forerun.core.program.kinds import OpKind  # noqa: E402
from forerun.core.program.types import Phase  # noqa: E402
from forerun.describe.cluster.catalog import load_cluster  # noqa: E402
from forerun.describe.model.spec import ModelSpec  # noqa: E402
from forerun.describe.plan.plan import Plan  # noqa: E402
from forerun.describe.stacks.catalog import load_stack  # noqa: E402
from forerun.sources.symbolic.build import build  # noqa: E402
from forerun.sources.trace.module import trace_module  # noqa: E402

pytestmark = pytest.mark.slow

_FILE = Path(__file__).parents[3] / "examples" / "llama" / "model.py"
_SPEC = importlib.util.spec_from_file_location("llama_with_flex", _FILE)
llama = importlib.util.module_from_spec(_SPEC)
sys.modules["llama_with_flex"] = llama
_SPEC.loader.exec_module(llama)

SEQ, HEADS = 1024, 8
MODES = {
    "shared keys, two samples": (2, Plan(seq_len=SEQ, stack="pytorch", micro_batch=2, dp_shard=8)),
    "recomputed": (
        2,
        Plan(seq_len=SEQ, stack="pytorch", micro_batch=2, dp_shard=8, activation_checkpointing="full"),
    ),
    "kept by a checkpoint's policy": (
        2,
        Plan(seq_len=SEQ, stack="pytorch", micro_batch=2, dp_shard=8, activation_checkpointing="selective"),
    ),
    "fp32, one sample": (8, Plan(seq_len=SEQ, stack="pytorch", precision="fp32")),
}
LATER = ("recomputed", "fp32, one sample")
"""modes of the long tests"""
MEMORY = 0.02
TRAFFIC = 0.02


class Attention(llama.Attention):
    """The example's attention by flex_attention, as nothing compiles it."""

    def forward(self, x, turns):
        batch, seq, _ = x.shape
        q, k, v = (w(x).view(batch, seq, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (llama.turned(q, turns), llama.turned(k, turns), v))
        out = flex_attention(q, k, v, block_mask=_mask(seq, x.device), enable_gqa=self.repeats > 1)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


@cache
def _mask(seq, device):
    return create_block_mask(lambda b, h, query, key: query >= key, None, None, seq, seq, device=device)


@cache
def both(mode):
    """(traced, symbolic) Program of one mode."""
    kv_heads, plan = MODES[mode]
    config = llama.LlamaConfig(512, 2, HEADS, kv_heads, 1024, 2000, SEQ)

    def model():
        llama.Attention, original = Attention, llama.Attention
        try:
            return llama.Llama(config)
        finally:
            llama.Attention = original

    tokens = torch.empty(plan.micro_batch, SEQ, dtype=torch.int64, device="meta")
    spec = ModelSpec("llama", 2, 512, HEADS, kv_heads, 64, 1024, 2000)
    stack = replace(load_stack("pytorch"), repeat_kv=False, blas_workspaces=0)  # a prediction of a trace adds them
    symbolic = build(spec, replace(plan, attention="flex_uncompiled"), load_cluster("h100-sxm"), stack)
    return trace_module(model, tokens, plan, fold=False), symbolic


def sums(program, column, kind, phase=None):
    counts = op_counts(program, tuple(Phase) if phase is None else (phase,))[0]
    return float((counts * column * (program.ops.kind == kind)).sum())


def modes(*precisions):
    """The modes of these precisions as parameters."""
    return [
        pytest.param(mode, marks=pytest.mark.long) if mode in LATER else mode
        for mode, (_, plan) in MODES.items()
        if plan.precision in precisions
    ]


@pytest.mark.parametrize("mode", modes("bf16", "fp32"))
def test_work_is_equal_in_every_phase(mode):
    traced, symbolic = both(mode)
    for phase in Phase:
        work = [sums(each, each.ops.flops, OpKind.GEMM, phase) for each in (traced, symbolic)]
        assert work[0] == work[1], phase
    for each in (traced, symbolic):
        assert OpKind.ATTENTION not in each.ops.kind


@pytest.mark.parametrize("mode", modes("bf16", "fp32"))
def test_peaks_are_equal(mode):
    traced, symbolic = (profile(program)[0].peak_bytes for program in both(mode))
    assert traced == pytest.approx(symbolic, rel=MEMORY)


@pytest.mark.parametrize("mode", modes("bf16"))
def test_memory_bound_kernels_move_as_many_bytes(mode):
    """Not in fp32, where the symbolic norms and rotations count casts that there are none of."""
    moved = [sums(each, each.ops.bytes_read + each.ops.bytes_written, OpKind.MEMORY) for each in both(mode)]
    assert moved[0] == pytest.approx(moved[1], rel=TRAFFIC)
