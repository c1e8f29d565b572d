"""Flex attention that nothing compiles: what it holds, computes and keeps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ImpossiblePlan
from forerun.core.memory.profile import profile
from forerun.core.program.counts import op_counts
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Phase
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import check_plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build
from forerun.sources.symbolic.kernels import TransformerKernels
from forerun.sources.symbolic.mesh import groups_of
from forerun.sources.symbolic.unfused_flex import Sizes, unfused_flex

from .cases import CLUSTER, DENSE, plan

OURS = "attention.flex."
WIDE = 4


def operation(sizes: Sizes, precision: str = "bf16"):
    """The operation with the table that its kernels stand in."""
    wanted = plan(precision=precision)
    kernels = TransformerKernels(
        DENSE, wanted, load_stack("pytorch"), groups_of(wanted, 8), CLUSTER.device.architecture
    )
    return unfused_flex(kernels, sizes, ("q", "k", "v"), (("o", 1), ("lse", 1)), 0), kernels.ops.build()


def most_held(held, stages) -> int:
    """Most bytes at once."""
    return max(sum(size for size, first, last in held if first <= i <= last) for i in range(len(stages)))


def program_of(**fields):
    return build(DENSE, plan(**fields), CLUSTER, replace(load_stack("pytorch"), repeat_kv=False))


def flops(program, phase):
    ours = [name.startswith(OURS) for name in program.ops.name]
    counts = op_counts(program, (phase,))[0]
    return float((counts * program.ops.flops * (program.ops.kind == OpKind.GEMM) * ours).sum())


@pytest.mark.parametrize(("precision", "forward", "backward"), [("bf16", 4.25, 6.5), ("fp32", 4.25, 7.0)])
def test_it_holds_so_many_fp32_copies_of_the_scores(precision, forward, backward):
    """Counted by hand in sdpa_dense and sdpa_dense_backward, of sizes where the scores are all that matters."""
    sizes = Sizes(1, 128, 64, 512, 512, 2, 2)
    op, _ = operation(sizes, precision)
    scores = sizes.scores * WIDE
    assert most_held(op.forward_held, op.forward) / scores == pytest.approx(forward, rel=0.01)
    assert most_held(op.backward_held, op.backward) / scores == pytest.approx(backward, rel=0.02)


@given(
    st.integers(1, 3), st.sampled_from([(1, 1), (8, 8), (8, 2)]), st.integers(1, 300), st.sampled_from([32, 64]),
    st.sampled_from(["bf16", "fp32"]),
)  # fmt: skip
def test_what_is_held_is_held_by_stages_that_there_are(batch, heads, seq, head_dim, precision):
    op, _ = operation(Sizes(batch, *heads, seq, seq, head_dim, head_dim), precision)
    for held, stages in ((op.forward_held, op.forward), (op.backward_held, op.backward)):
        assert all(size > 0 and 0 <= first <= last < len(stages) for size, first, last in held)


def test_products_are_of_all_scores_two_there_and_five_back():
    sizes = Sizes(2, 8, 2, 512, 512, 64, 32)
    op, table = operation(sizes)
    per_element = 2 * sizes.scores
    there, back = (
        sum(table.flops[kernel] for stage in stages for kernel, _ in stage) for stages in (op.forward, op.backward)
    )
    assert there == per_element * (64 + 32)
    assert back == per_element * (3 * 64 + 2 * 32)


def test_the_mask_saves_nothing():
    causal = program_of(attention="flex_uncompiled")
    free = build(replace(DENSE, causal=False), plan(attention="flex_uncompiled"), CLUSTER)
    assert flops(causal, Phase.FORWARD) == flops(free, Phase.FORWARD) > 0


def test_memory_grows_with_the_square_of_the_sequence_and_the_fused_kernels_does_not():
    peaks = {
        kernel: [profile(program_of(seq_len=seq, attention=kernel))[0].peak_bytes for seq in (4096, 8192)]
        for kernel in ("flex", "flex_uncompiled")
    }
    scores = [DENSE.n_heads * seq * seq * WIDE for seq in (4096, 8192)]
    assert peaks["flex"][1] < 2.1 * peaks["flex"][0]
    assert peaks["flex_uncompiled"][1] - peaks["flex_uncompiled"][0] > 6.0 * (scores[1] - scores[0])


def test_a_checkpoint_runs_it_again():
    again = program_of(attention="flex_uncompiled", activation_checkpointing="full")
    assert flops(again, Phase.RECOMPUTE) == flops(again, Phase.FORWARD)
    assert flops(program_of(attention="flex_uncompiled"), Phase.RECOMPUTE) == 0


def test_compiling_the_rest_of_a_layer_does_not_change_it():
    for compiled in (False, True):
        program = program_of(attention="flex_uncompiled", compile=compiled)
        ours = [i for i, name in enumerate(program.ops.name) if name.startswith(OURS)]
        assert sum(program.ops.kind[i] == OpKind.MEMORY for i in ours) > 30


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        (DENSE, {"cp": 2}, "cp 2 needs a flash attention kernel, not flex_uncompiled"),
        (load_model("llama-3.2-1b"), {"cp": 4, "cp_method": "allgather"}, "not flex_uncompiled"),
    ],
)
def test_a_sequence_cut_in_parts_is_refused(model, fields, words):
    with pytest.raises(ImpossiblePlan, match=words):
        check_plan(model, plan(attention="flex_uncompiled", **fields), CLUSTER)
