"""Flex attention that nothing compiles: what it holds, computes and keeps."""

from collections import Counter
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

from .by_hand import block_of
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


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_held_lives_in_a_block_from_its_first_stage_to_its_last(direction):
    op, _ = operation(Sizes(1, 16, 8, 2048, 2048, 64, 64))
    program = program_of(attention="flex_uncompiled")
    block = block_of(program, f"layer.{direction}")
    nodes = [node for node, number in enumerate(block.op) if program.ops.name[number].startswith(OURS)]
    held = op.forward_held if direction == "forward" else op.backward_held
    lives = Counter(zip(block.tensor_bytes, block.tensor_alloc, block.tensor_free, strict=True))
    assert held
    assert not Counter((size, nodes[first], nodes[last]) for size, first, last in held) - lives


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


# -- every kernel, by hand: 2 samples, 4 heads on 2 of keys and values, 32 queries, 16 keys, widths 8 and 6 ------------

SIZES = Sizes(2, 4, 2, 32, 16, 8, 6)
ROWS = 2 * 4 * 32
S = ROWS * 16
"""scores"""
Q, K, V, OUT = ROWS * 8, 2 * 4 * 16 * 8, 2 * 4 * 16 * 6, ROWS * 6
"""queries, repeated keys and values, output"""
FLAGS = 32 * 16

SCORES_THERE = [
    ("values", 2 * V / 2, 2 * V),
    ("keys", 2 * K / 2, 2 * K),
    ("queries", 2 * Q, 4 * Q),
    ("queries.contiguous", 4 * Q, 4 * Q),
    ("wide_keys", 2 * K, 4 * K),
    ("scores", 2 * (Q + K), 2 * S),
    ("scale", 4 * S, 4 * S),
    ("mask", 4 * (32 + 16), FLAGS),
    ("masked", 4 * S + FLAGS, 4 * S),
]
SCORES_HELD = [
    (4 * Q, "queries", "scores"),
    (4 * Q, "queries.contiguous", "scores"),
    (4 * K, "wide_keys", "scores"),
    (4 * S, "scores", "scale"),
    (FLAGS, "mask", "masked"),
]


def rows(stages, table):
    """(name, bytes read, bytes written) of kernels one after the other."""
    kernels = [kernel for stage in stages for kernel, _ in stage]
    return [(table.name[k].removeprefix(OURS), table.bytes_read[k], table.bytes_written[k]) for k in kernels]


def named(held, stages, table):
    """Held memory with the names of the kernels that first and last need it."""
    names = [name for name, *_ in rows(stages, table)]
    return sorted((size, names[first], names[last]) for size, first, last in held)


def test_kernels_of_the_forward_pass():
    op, table = operation(SIZES)
    assert rows(op.forward, table) == [
        *SCORES_THERE,
        ("amax", 4 * S, 4 * ROWS),
        ("exponentials", 4 * S, 4 * S),
        ("exp", 4 * S, 4 * S),
        ("logsumexp", 4 * S, 4 * ROWS),
        ("is_masked", 4 * S, S),
        ("masked_rows", S, ROWS),
        ("max", 4 * S, (4 + 8) * ROWS),  # values and their indices
        ("softmax", 4 * S, 4 * S),
        ("no_finite_score", 4 * S, S),
        ("unsafe_rows", S, ROWS),
        ("safe_softmax", 4 * S, 4 * S),
        ("narrow", 4 * S, 2 * S),
        ("values_of", 2 * (S + V), 2 * OUT),
        ("layout", 2 * OUT, 2 * OUT),
    ]
    assert named(op.forward_held, op.forward, table) == sorted(
        [
            *SCORES_HELD,
            *((2 * size, name, "layout") for size, name in ((V, "values"), (K, "keys"))),
            *((2 * size, name, "layout") for size, name in ((OUT, "values_of"), (S, "narrow"))),
            *((4 * S, name, "layout") for name in ("scale", "safe_softmax")),
            *((4 * S, name, "safe_softmax") for name in ("masked", "softmax")),
            (4 * S, "exponentials", "logsumexp"),
            (S, "is_masked", "masked_rows"),
            (S, "no_finite_score", "safe_softmax"),
        ]
    )


def test_kernels_of_the_backward_pass():
    op, table = operation(SIZES)
    inputs = (Q, K // 2, V // 2)
    assert rows(op.backward, table) == [
        *(("layout.grad", 2 * size, 2 * size) for size in inputs),
        *SCORES_THERE,
        *((name, 4 * S, 4 * S) for name in ("difference", "exp", "softmax")),
        ("narrow", 4 * S, 2 * S),
        ("grad", 2 * OUT, 2 * OUT),
        ("grad_values", 2 * (S + OUT), 2 * V),
        ("wide_grad", 2 * OUT, 4 * OUT),
        ("wide_grad.contiguous", 4 * OUT, 4 * OUT),
        ("wide_values", 2 * V, 4 * V),
        ("grad_softmax", 2 * (OUT + V), 2 * S),
        ("wide_out", 2 * OUT, 4 * OUT),
        ("wide_grad", 2 * OUT, 4 * OUT),
        ("out_grad", 8 * OUT, 4 * OUT),
        ("row_sums", 4 * OUT, 4 * ROWS),
        *((name, 4 * S, 4 * S) for name in ("centred", "centred_again")),
        ("grad_masked", 8 * S, 4 * S),
        ("grad_scaled", 4 * S, 4 * S),
        ("grad_narrow", 4 * S, 2 * S),
        ("mask", 4 * (32 + 16), FLAGS),
        ("grad_scores", 2 * S + FLAGS, 2 * S),
        ("grad_queries", 2 * (S + K), 2 * Q),
        ("queries.contiguous", 2 * Q, 2 * Q),
        ("grad_keys", 2 * (S + Q), 2 * K),
        ("sum_keys", 2 * K, 2 * K / 2),
        ("sum_values", 2 * V, 2 * V / 2),
        *(("grad_out", 2 * size, 2 * size) for size in inputs),
    ]
    end = "grad_out"
    assert named(op.backward_held, op.backward, table) == sorted(
        [
            *SCORES_HELD,
            (2 * V, "values", end),
            (2 * K, "keys", end),
            (4 * S, "scale", end),
            (4 * S, "masked", end),
            (4 * S, "difference", "exp"),
            (4 * S, "exp", "softmax"),
            (4 * S, "softmax", end),
            (2 * S, "narrow", "grad_values"),
            (2 * OUT, "grad", "grad_values"),
            (2 * V, "grad_values", "sum_values"),
            (4 * OUT, "wide_grad", "grad_softmax"),
            (4 * OUT, "wide_grad.contiguous", "grad_softmax"),
            (4 * V, "wide_values", "grad_softmax"),
            (4 * S, "grad_softmax", end),
            (4 * OUT, "wide_out", "out_grad"),
            (4 * OUT, "wide_grad", "out_grad"),
            (4 * OUT, "out_grad", "row_sums"),
            (4 * S, "centred", "centred_again"),
            (4 * S, "centred_again", "grad_masked"),
            (4 * S, "grad_masked", end),
            (4 * S, "grad_scaled", "grad_narrow"),
            (2 * S, "grad_narrow", "grad_scores"),
            (FLAGS, "mask", "grad_scores"),
            (2 * S, "grad_scores", end),
            (2 * Q, "grad_queries", end),
            (2 * Q, "queries.contiguous", "grad_keys"),
            (2 * K, "grad_keys", "sum_keys"),
            (2 * K / 2, "sum_keys", end),
            (2 * V / 2, "sum_values", end),
        ]
    )


def test_one_sample_needs_no_contiguous_copies():
    op, table = operation(replace(SIZES, batch=1))
    names = {name for stages in (op.forward, op.backward) for name, *_ in rows(stages, table)}
    assert not names & {"queries.contiguous", "wide_grad.contiguous", "grad"}


def test_an_fp32_model_needs_no_copies_in_fp32():
    op, table = operation(SIZES, "fp32")
    names = {name for stages in (op.forward, op.backward) for name, *_ in rows(stages, table)}
    assert not names & {"queries", "wide_keys", "narrow", "wide_grad", "wide_values", "wide_out", "grad_narrow"}
    assert {"queries.contiguous", "wide_grad.contiguous", "grad"} <= names


@pytest.mark.parametrize(("precision", "scores", "values"), [("bf16", "fp32", "bf16"), ("tf32", "tf32", "tf32")])
def test_products_with_scores_are_in_fp32(precision, scores, values):
    _, table = operation(SIZES, precision)
    dtypes = {name.removeprefix(OURS): dtype for name, dtype in zip(table.name, table.dtype, strict=True)}
    assert (dtypes["scores"], dtypes["grad_softmax"], dtypes["values_of"]) == (scores, scores, values)
    assert (dtypes["grad_queries"], dtypes["grad_keys"], dtypes["grad_values"]) == (values,) * 3
