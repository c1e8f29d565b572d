"""SimpleFSDP's parametrisation: how long gathered weights live, small ones, and what one graph writes in place."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.units import MIB
from forerun.core.program.types import Collective, Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

CLUSTER = load_cluster("a100-80gb-sxm")
MODEL = ModelSpec(
    name="small",
    n_layers=4,
    hidden=1024,
    n_heads=8,
    n_kv_heads=8,
    head_dim=128,
    ffn_hidden=4096,
    vocab=8192,
    mlp="gelu",
    norm="layernorm",
    position="none",
    mlp_bias=True,
    norm_bias=True,
)
EAGER = Plan(seq_len=2048, micro_batch=2, dp_shard=4, stack="simple-fsdp", reduce_dtype="bf16", attention="sdpa")
PIECES = replace(EAGER, compile=True, graph_breaks=True)
WHOLE = replace(EAGER, compile=True)
ATTENTION, FFN = 4 * 1024 * 1024, 2 * 4096 * 1024
"""elements of a layer's matrices"""
LAYERS = MODEL.n_layers
TOKENS = 2 * 2048


def peak_bytes(**fields: object) -> float:
    return predict(MODEL, replace(PIECES, **fields), CLUSTER).peak_allocated_gib * 2**30


def gathered(program: Program, kind: Collective = Collective.ALL_GATHER) -> float:
    """Bytes of all collectives of a kind in a step."""
    rank, ops, total = program.rank_classes[0], program.ops, 0.0
    for number, count in enumerate(np.bincount(rank.block, minlength=len(program.blocks))):
        for op in program.blocks[number].op:
            if ops.collective[op] == kind and ops.bytes_comm[op]:
                total += int(count) * float(ops.bytes_comm[op])
    return total


def test_eager_code_keeps_what_no_checkpoint_gathers_again():
    selective = {"activation_checkpointing": "selective"}
    head = MODEL.hidden * MODEL.vocab
    both, mlp, params = (
        gathered(build(MODEL, replace(PIECES, selective_policy=policy, **selective), CLUSTER))
        for policy in ("attention+mlp", "mlp", "params")
    )
    assert params == gathered(build(MODEL, PIECES, CLUSTER))
    assert both - mlp == pytest.approx(2 * LAYERS * ATTENTION, rel=0.01)
    assert mlp - params == pytest.approx(2 * LAYERS * FFN, rel=0.01)
    assert params == pytest.approx(2 * (LAYERS * (ATTENTION + FFN) + 2 * head), rel=0.01)


def test_one_graph_gathers_again_unless_told_to_keep():
    whole, never = (
        gathered(build(MODEL, replace(WHOLE, reshard_after_forward=policy), CLUSTER)) for policy in ("default", "never")
    )
    assert whole - never == pytest.approx(2 * LAYERS * (ATTENTION + FFN), rel=0.01)


def test_one_graph_writes_the_gradient_of_the_logits_over_them():
    logits = 2 * TOKENS * MODEL.vocab * 4
    wide = replace(MODEL, vocab=4 * MODEL.vocab)
    pieces, whole = (
        predict(wide, replace(plan, reshard_after_forward="never"), CLUSTER).peak_allocated_gib * 2**30
        for plan in (PIECES, WHOLE)
    )
    head = 2 * wide.hidden * wide.vocab  # its gradient comes after, when the logits of pieces are still there twice
    assert logits - head <= pieces - whole <= logits


def test_small_parameters_are_summed_whole():
    program = build(MODEL, replace(PIECES, shard_min_mib=1.0), CLUSTER)
    small = LAYERS * (4096 + 1024 + 4 * 1024) + 2 * 1024
    assert gathered(program, Collective.ALL_REDUCE) == 2 * small
    assert gathered(build(MODEL, PIECES, CLUSTER), Collective.ALL_REDUCE) == 0
    whole, sharded = peak_bytes(shard_min_mib=1.0), peak_bytes()
    assert whole - sharded == pytest.approx(0.75 * 12 * small, abs=1 * MIB)  # weights and two states of 4 bytes


def test_one_gpu_casts_what_it_has_not_to_gather():
    one = replace(PIECES, dp_shard=1)
    assert gathered(build(MODEL, one, CLUSTER)) == 0
    kept, again = (
        predict(MODEL, replace(one, activation_checkpointing=mode, selective_policy=policy), CLUSTER)
        for mode, policy in (("selective", "params"), ("selective", "attention+mlp"))
    )
    assert kept.peak_allocated_gib > again.peak_allocated_gib


def test_autocast_keeps_casts_of_weights_and_an_fp32_loss():
    alone = Plan(seq_len=2048, micro_batch=2, zero_stage=0, stack="simple-fsdp", autocast=True)
    weights = LAYERS * (ATTENTION + FFN) + MODEL.hidden * MODEL.vocab
    cast, narrow = (
        predict(MODEL, replace(alone, autocast=on), CLUSTER).peak_allocated_gib * 2**30 for on in (True, False)
    )
    loss = TOKENS * MODEL.vocab * 4  # log-softmax and its gradient are 2 bytes wider each
    stream = TOKENS * MODEL.hidden * 2 * (2 * LAYERS + 1)  # what norms read
    assert cast - narrow == pytest.approx(2 * weights + loss + stream, rel=0.02)
