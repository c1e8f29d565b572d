"""Several residual streams, learned residuals, inputs of layers and experts without weights, in Programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.core.program.counts import op_counts
from forerun.core.program.model_flops import counted_flops
from forerun.core.program.types import Category, OpKind, Phase, Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.layer_parameters import kind_parameters
from forerun.describe.model.matrices import matrices
from forerun.describe.model.parameters import outer_parameters, parameter_count
from forerun.describe.model.spec import IndexerSpec, MLASpec, ModelSpec, MoESpec
from forerun.describe.model.streams import StreamsSpec
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

PLAIN = ModelSpec("m", 4, 256, 4, 2, 64, 512, 1000)
ALTUP = replace(PLAIN, streams=StreamsSpec(4, "altup"), laurel_rank=16, layer_input=32, layer_input_vocab=500)
CLUSTER = load_cluster("h100-sxm")
SEQ = 128


def program_of(model: ModelSpec, **plan: object) -> Program:
    return build(model, Plan(seq_len=SEQ, activation_checkpointing="none", **plan), CLUSTER)  # type: ignore[arg-type]


def forward_flops(model: ModelSpec) -> float:
    program = program_of(model)
    return counted_flops(program, op_counts(program, {Phase.FORWARD}))


def sent_bytes(program: Program) -> list[int]:
    """Sizes of the transfers between stages, sorted."""
    sends = program.ops.kind == OpKind.P2P
    return sorted({int(size) for size in program.ops.bytes_comm[sends]})


@pytest.mark.parametrize("rule", ["altup", "hyper", "gated"])
def test_held_parameters_of_streams_are_those_counted(rule: str) -> None:
    model = replace(PLAIN, streams=StreamsSpec(4, rule))  # type: ignore[arg-type]
    built = program_of(model).rank_classes[0].resident_bytes
    plain = program_of(PLAIN).rank_classes[0].resident_bytes
    more = parameter_count(model) - parameter_count(PLAIN)
    assert more > 0
    # fp32 weights and two fp32 moments, as torchtitan keeps them
    assert int(built.sum() - plain.sum()) == pytest.approx(more * 12, rel=0.01)


def test_products_of_altup_and_learned_residuals_count() -> None:
    more = forward_flops(ALTUP) - forward_flops(PLAIN)
    n, hidden = 4, 256
    router = 2 * (hidden * n) + n * n * n + n * n  # both routers, predictions and corrections
    layer = router + 2 * hidden * 16 + 2 * hidden * 32
    outside = 2 * (n - 1) * hidden * hidden + hidden * 4 * 32
    assert more == 2 * SEQ * (4 * layer + outside)


def test_a_hyper_connection_reads_all_streams_in_both_halves() -> None:
    model = replace(PLAIN, streams=StreamsSpec(4, "hyper"))
    more = forward_flops(model) - forward_flops(PLAIN)
    assert more == 2 * SEQ * (4 * 256) * (4 * 2 * (4 * 4 + 2 * 4) + 4)
    assert kind_parameters(model.layer(0))["streams"] == 2 * (24 * (4 * 256 + 1) + 3)
    assert outer_parameters(model)["streams"] == 4 * (4 * 256 + 1) + 1


def test_streams_cross_pipeline_borders_with_the_inputs_of_later_layers() -> None:
    row = SEQ * 2
    assert sent_bytes(program_of(PLAIN, pp=2, n_microbatches=4)) == [row * 256]
    assert sent_bytes(program_of(ALTUP, pp=2, n_microbatches=4)) == [row * (4 * 256 + 2 * 32)]
    found = sent_bytes(program_of(ALTUP, pp=4, n_microbatches=4))
    assert found == [row * (4 * 256 + behind * 32) for behind in (1, 2, 3)]


def test_keys_and_values_cross_a_border_once_for_all_layers_that_share_them() -> None:
    changes = tuple((("shared_kv", number > 1), ("sliding_window", 64 if number % 2 else None)) for number in range(4))
    model = replace(PLAIN, layers=changes)
    assert [model.kv_source(number) for number in range(4)] == [0, 1, 0, 1]
    both = 2 * 2 * 64 * 2  # keys and values of two layers, of 2 heads of 64
    assert sent_bytes(program_of(model, pp=2, n_microbatches=4)) == [SEQ * 2 * (256 + both)]
    assert sent_bytes(program_of(model, pp=4, n_microbatches=4)) == [
        SEQ * 2 * (256 + more) for more in (both // 2, both)
    ]


@pytest.mark.parametrize("stack", ["megatron-core", "pytorch"])
def test_a_stage_holds_the_inputs_that_it_got_until_their_gradients_leave(stack: str) -> None:
    inputs = replace(PLAIN, layer_input=2048, layer_input_vocab=500)
    program = program_of(inputs, pp=2, n_microbatches=4, stack=stack)
    change = seen = 0
    last = program.rank_classes[-1]
    for number in last.block:
        block = program.blocks[number]
        carried = (block.tensor_bytes == SEQ * 2 * 2 * 2048) & (block.tensor_category == Category.ACTIVATION)
        seen += int(carried.sum())
        change += int((carried & (block.tensor_free < 0)).sum()) - int((carried & (block.tensor_alloc < 0)).sum())
    assert change == 0
    assert seen == 8 * (stack == "megatron-core")  # PyTorch keeps what it receives in buffers


def test_experts_without_weights_take_their_share_of_the_choices() -> None:
    moe = MoESpec(8, 4, 128, zero_experts=8)
    assert (moe.choices, moe.mean_reached) == (16, 2.0)
    with_zero, half = replace(PLAIN, moe=moe), replace(PLAIN, moe=MoESpec(8, 2, 128))
    flops = [forward_flops(model) for model in (with_zero, half)]
    assert flops[0] - flops[1] == 2 * SEQ * 4 * 256 * 8  # the router alone
    with pytest.raises(ForerunError, match="zero_experts"):
        MoESpec(8, 4, 128, zero_experts=-1)


def test_streams_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(ForerunError, match="count must be at least 2"):
        StreamsSpec(1, "altup")
    with pytest.raises(ForerunError, match="halves in turn"):
        replace(ALTUP, parallel=True)


def test_a_sparse_gate_moves_memory_and_multiplies_nothing() -> None:
    sparse = program_of(replace(PLAIN, sparse_gate=True))
    assert forward_flops(replace(PLAIN, sparse_gate=True)) == forward_flops(PLAIN)
    assert np.isin("sparse_gate", np.array(sparse.ops.name))


def test_layers_that_share_an_indexer_only_read_fewer_keys() -> None:
    mla = MLASpec(32, 48, 16, 64)
    whole = replace(PLAIN, mla=mla, attention_gate=True, n_kv_heads=4)
    chosen = replace(whole, indexer=IndexerSpec(2, 32, SEQ // 4, shared=True))
    own = replace(whole, indexer=IndexerSpec(2, 32, SEQ // 4))
    assert parameter_count(chosen) == parameter_count(whole) < parameter_count(own)
    scores = 2 * SEQ * SEQ * 4 * (64 + 64) * 4  # of four layers with four heads
    assert forward_flops(whole) - forward_flops(chosen) == scores * 3 / 4
    gate = 2 * SEQ * 4 * 256 * 4 * 64
    assert forward_flops(whole) - forward_flops(replace(whole, attention_gate=False)) == gate
    assert sum(m * n for (m, n), k in matrices(chosen).items() for _ in range(k)) < parameter_count(chosen)


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
def test_norms_of_values_take_time_where_a_layer_has_values_of_its_own(stack: str) -> None:
    def norms(model: ModelSpec) -> float:
        program = program_of(model, stack=stack)
        here = np.array(program.ops.name) == "weightless_norm"
        counts = op_counts(program, {Phase.FORWARD})[0]
        return float((counts * (program.ops.bytes_read + program.ops.bytes_written))[here].sum())

    normed = replace(PLAIN, qk_norm=True, value_norm=True)
    assert norms(replace(PLAIN, qk_norm=True)) == 0
    assert norms(normed) >= 4 * SEQ * 2 * 64 * 4  # two heads of four layers, read and written
    assert norms(replace(normed, equal_kv=True)) == norms(normed)
    assert norms(replace(normed, layers=((), (("shared_kv", True),)))) == norms(normed) / 2
    assert forward_flops(normed) == forward_flops(replace(normed, value_norm=False))
