"""What every parallelism sends in a step, forward and backward, counted and multiplied out by hand.

The dense model has 2 layers and hidden size 1,024; the mixture-of-experts model has one dense and one expert layer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from forerun.core.program.types import Collective, OpKind, Phase
from forerun.describe.model.spec import ModelSpec, MoESpec
from forerun.sources.symbolic.build import build

from .cases import CLUSTER, DENSE, plan

F, R, B = "forward", "recompute", "backward"
GATHER, SCATTER, REDUCE, ALL_TO_ALL, SEND = "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"

TOKENS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 1024, 2816, 16, 8, 64, 32000
MODEL = dataclasses.replace(DENSE, n_layers=2)
MATRICES = 2 * HIDDEN * HEADS * HEAD_DIM + 2 * HIDDEN * KV_HEADS * HEAD_DIM + 3 * HIDDEN * FFN
"""parameters in the matrices of a layer: queries, output, keys, values, and three of the feed-forward"""
NORMS = 2 * HIDDEN
EMBEDDING = VOCABULARY * HIDDEN
ALL = 2 * (MATRICES + NORMS) + EMBEDDING + (EMBEDDING + HIDDEN)
"""parameters of the model: layers, embedding, and the head with its norm"""
BF16, FP32 = 2, 4
ACTIVATIONS = TOKENS * HIDDEN * BF16
ROUTED = TOKENS * 2 * HIDDEN * BF16
"""bytes of the tokens that a rank sends to experts, each token to two"""
EXPERTS, EXPERT_FFN, SHARED_FFN = 8, 704, 1408
MOE = ModelSpec(
    "moe", 2, HIDDEN, HEADS, HEADS, HEAD_DIM, FFN, VOCABULARY, moe=MoESpec(EXPERTS, 2, EXPERT_FFN, SHARED_FFN, 1)
)  # fmt: skip

Traffic = dict[tuple[str, str, str, int, float], int]
"""(phase, what, axis of the group, its size, bytes of the whole buffer) -> how many times in a step"""


def traffic(model: ModelSpec, rank_class: int = 0, **fields: object) -> Traffic:
    """What one rank sends in a step, but for the norm of the gradients."""
    program = build(model, plan(**fields), CLUSTER)
    ops, found = program.ops, Counter()
    for number in program.rank_classes[rank_class].block:
        block = program.blocks[number]
        for op, phase in zip(block.op, block.phase, strict=True):
            if ops.kind[op] in (OpKind.COLLECTIVE, OpKind.P2P) and phase != Phase.OPTIMIZER:
                group = program.groups[ops.group[op]]
                what = Collective(ops.collective[op]).name.lower()
                found[Phase(phase).name.lower(), what, group.axis, group.size, float(ops.bytes_comm[op])] += 1
    return dict(found)


def along(axis: str, found: Traffic) -> Traffic:
    """The part of the traffic that groups of one axis of the mesh carry."""
    return {key: times for key, times in found.items() if key[2] == axis}


# -- data parallelism --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_ddp_sums_all_gradients_once_a_step(n_microbatches: int) -> None:
    found = traffic(MODEL, dp_replicate=4, zero_stage=0, ddp_bucket_mib=1000, n_microbatches=n_microbatches)
    assert found == {(B, REDUCE, "dp_all", 4, ALL * FP32): 1}


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_sharded_optimizer_scatters_gradients(zero_stage: int) -> None:
    found = traffic(MODEL, dp_shard=4, zero_stage=zero_stage, ddp_bucket_mib=1000, stack="pytorch")
    assert found == {(B, SCATTER, "dp_shard", 4, ALL * FP32): 1}


def fsdp(layer: int, embedding: int, head: int, size: int) -> Traffic:
    """Gathers of bf16 parameters for forward and again for backward, whose blocks are one, and fp32 gradients."""
    gathers = {(layer, 4), (embedding, 2), (head, 1)}  # the head stays gathered from forward to backward
    reductions = {(layer, 2), (embedding, 1), (head, 1)}
    return {(F, GATHER, "dp_shard", size, count * BF16): times for count, times in gathers} | {
        (B, SCATTER, "dp_shard", size, count * FP32): times for count, times in reductions
    }


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_fsdp_gathers_every_unit_twice_and_scatters_its_gradients(checkpointing: str) -> None:
    found = traffic(MODEL, dp_shard=4, activation_checkpointing=checkpointing)
    assert found == fsdp(MATRICES + NORMS, EMBEDDING, EMBEDDING + HIDDEN, 4)


def test_fsdp_without_resharding_gathers_every_unit_once() -> None:
    found = traffic(MODEL, dp_shard=4, reshard_after_forward="never")
    once = {key: 2 if key[-1] == (MATRICES + NORMS) * BF16 else 1 for key in found if key[1] == GATHER}
    assert {key: times for key, times in found.items() if key[1] == GATHER} == once
    assert len(once) == 3


def test_accumulation_repeats_gathers_and_reductions() -> None:
    one, three = (traffic(MODEL, dp_shard=4, n_microbatches=n) for n in (1, 3))
    assert three == {key: 3 * times for key, times in one.items()}


def test_hybrid_sharding_sums_the_shards_of_replicas() -> None:
    found = traffic(MODEL, dp_shard=4, dp_replicate=2)
    assert along("dp_shard", found) == fsdp(MATRICES + NORMS, EMBEDDING, EMBEDDING + HIDDEN, 4)
    assert along("dp_replicate", found) == {
        (B, REDUCE, "dp_replicate", 2, (MATRICES + NORMS) / 4 * FP32): 2,
        (B, REDUCE, "dp_replicate", 2, EMBEDDING / 4 * FP32): 1,
        (B, REDUCE, "dp_replicate", 2, (EMBEDDING + HIDDEN) / 4 * FP32): 1,
    }


def test_tensor_parallel_ranks_shard_what_they_have() -> None:
    """Matrices are cut, norms are not."""
    found = traffic(MODEL, dp_shard=2, tp=2)
    half = EMBEDDING // 2
    assert along("dp_shard", found) == fsdp(MATRICES // 2 + NORMS, half, half + HIDDEN, 2)


# -- tensor and sequence parallelism -----------------------------------------------------------------------------------

LOSS = {(F, REDUCE, "tp", 4, TOKENS * FP32): 3}
"""largest logit, sum of exponentials and target's logit of every token"""


def test_sequence_parallelism_gathers_into_blocks_and_scatters_out_of_them() -> None:
    """Attention and feed-forward of 2 layers, and the head; the embedding is scattered out of only."""
    assert traffic(MODEL, tp=4) == LOSS | {
        (F, GATHER, "tp", 4, ACTIVATIONS): 2 * 2 + 1,
        (F, SCATTER, "tp", 4, ACTIVATIONS): 2 * 2 + 1,
        (B, GATHER, "tp", 4, ACTIVATIONS): 2 * 2 + 1,
        (B, SCATTER, "tp", 4, ACTIVATIONS): 2 * 2 + 1,
    }


def test_tensor_parallelism_alone_sums_activations() -> None:
    """The embedding sums in forward, where its parts are added, and the head in backward."""
    assert traffic(MODEL, tp=4, sequence_parallel=False) == LOSS | {
        (F, REDUCE, "tp", 4, ACTIVATIONS): 2 * 2 + 1,
        (B, REDUCE, "tp", 4, ACTIVATIONS): 2 * 2 + 1,
    }


def test_without_loss_parallelism_logits_are_gathered() -> None:
    found, parallel = (traffic(MODEL, tp=4, loss_parallel=on) for on in (False, True))
    gathered = {(F, GATHER, "tp", 4, TOKENS * VOCABULARY * BF16): 1}
    assert found == {key: times for key, times in parallel.items() if key not in LOSS} | gathered


def test_full_checkpointing_repeats_the_collectives_of_a_layer_but_for_the_last() -> None:
    """torch's checkpoint stops at the last tensor that backward needs, which is before the feed-forward's output.
    torchtitan switches this off from 2025-08 on.
    """
    for stack, outputs in (("torchtitan-0.1", 1), ("torchtitan", 2)):
        found, plain = (traffic(MODEL, tp=4, stack=stack, activation_checkpointing=kind) for kind in ("full", "none"))
        again = {(R, GATHER, "tp", 4, ACTIVATIONS): 2 * 2, (R, SCATTER, "tp", 4, ACTIVATIONS): 2 * outputs}
        assert found == plain | again


def test_megatron_gathers_activations_again_for_the_gradients_of_weights() -> None:
    """Its column-parallel layers keep their shard of the input, and need all of it in backward."""
    found = along("tp", traffic(MODEL, tp=4, stack="megatron-core", zero_stage=1, sequence_parallel=True))
    assert found == LOSS | {
        (F, GATHER, "tp", 4, ACTIVATIONS): 2 * 2 + 1,
        (F, SCATTER, "tp", 4, ACTIVATIONS): 2 * 2 + 1,
        (B, GATHER, "tp", 4, ACTIVATIONS): 2 * 2 + 1 + 2 * 2,
        (B, SCATTER, "tp", 4, ACTIVATIONS): 2 * 2 + 1,
    }


# -- pipeline parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_class", [0, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_stages_send_activations_forward_and_gradients_back(rank_class: int, tp: int) -> None:
    """Each of 4 micro batches once; under sequence parallelism a rank sends its part of the tokens."""
    found = traffic(MODEL, rank_class, pp=2, tp=tp, n_microbatches=4)
    assert along("pp_near", found) == {
        (F, SEND, "pp_near", 2, ACTIVATIONS / tp): 4,
        (B, SEND, "pp_near", 2, ACTIVATIONS / tp): 4,
    }


def test_interleaved_stages_pass_on_at_every_border() -> None:
    """Stages 0 and 2 of 4 are on the first rank: three borders of its stages are crossed by every micro batch."""
    found = traffic(
        dataclasses.replace(MODEL, n_layers=4),
        pp=2,
        virtual_stages=2,
        pp_schedule="Interleaved1F1B",
        n_microbatches=4,
    )
    assert found == {(F, SEND, "pp_near", 2, ACTIVATIONS): 12, (B, SEND, "pp_near", 2, ACTIVATIONS): 12}


# -- context parallelism -----------------------------------------------------------------------------------------------

CP = 4
HOPS = CP - 1
LAYERS = 2


def keys_and_values(heads: int, element: int, tp: int = 1) -> int:
    """Bytes of the keys and values of the tokens of one rank of 4."""
    return 2 * (TOKENS // CP) * (heads // tp) * HEAD_DIM * element


@pytest.mark.parametrize("tp", [1, 2])
def test_pytorchs_ring_passes_gradients_on_in_fp32_until_they_are_home(tp: int) -> None:
    """torchtitan repeats keys and values to all heads. Their gradients take a hop more than they do."""
    assert along("cp", traffic(MODEL, cp=CP, tp=tp, cp_method="ring")) == {
        (F, SEND, "cp", CP, keys_and_values(HEADS, BF16, tp)): LAYERS * HOPS,
        (B, SEND, "cp", CP, keys_and_values(HEADS, BF16, tp)): LAYERS * HOPS,
        (B, SEND, "cp", CP, keys_and_values(HEADS, FP32, tp)): LAYERS * (HOPS + 1),
    }


def test_pytorchs_gather_passes_gradients_on_as_its_ring_does() -> None:
    gathered = CP * keys_and_values(HEADS, BF16)
    assert along("cp", traffic(MODEL, cp=CP, cp_method="allgather")) == {
        (F, GATHER, "cp", CP, gathered): LAYERS,
        (B, GATHER, "cp", CP, gathered): LAYERS,
        (B, SEND, "cp", CP, keys_and_values(HEADS, FP32)): LAYERS * (HOPS + 1),
    }


def test_transformer_engines_ring_passes_gradients_on_with_the_keys() -> None:
    """In bf16, of the key and value heads that there are."""
    each = keys_and_values(KV_HEADS, BF16)
    assert along("cp", traffic(MODEL, cp=CP, cp_method="ring", stack="megatron-core")) == {
        (F, SEND, "cp", CP, each): LAYERS * HOPS,
        (B, SEND, "cp", CP, each): LAYERS * HOPS * 2,
    }


def test_transformer_engines_gather_scatters_gradients() -> None:
    gathered = CP * keys_and_values(KV_HEADS, BF16)
    assert along("cp", traffic(MODEL, cp=CP, cp_method="allgather", stack="megatron-core")) == {
        (F, GATHER, "cp", CP, gathered): LAYERS,
        (B, GATHER, "cp", CP, gathered): LAYERS,
        (B, SCATTER, "cp", CP, gathered): LAYERS,
    }


@pytest.mark.parametrize(("stack", "kv_heads"), [("torchtitan", HEADS), ("megatron-core", KV_HEADS)])
def test_ulysses_exchanges_heads_for_tokens_and_back(stack: str, kv_heads: int) -> None:
    """Queries, keys and values go in and the output comes back; their gradients go the other way."""
    output = TOKENS // CP * HEADS * HEAD_DIM * BF16
    into = output + keys_and_values(kv_heads, BF16)
    assert along("cp", traffic(MODEL, cp=CP, cp_method="ulysses", stack=stack)) == {
        (phase, ALL_TO_ALL, "cp", CP, size): LAYERS for phase in (F, B) for size in (into, output)
    }


def test_context_parallel_ranks_shard_parameters_and_sum_gradients() -> None:
    assert along("dp_shard", traffic(MODEL, cp=CP)) == fsdp(MATRICES + NORMS, EMBEDDING, EMBEDDING + HIDDEN, CP)


# -- expert parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_tokens_go_to_their_experts_and_back_in_both_directions(checkpointing: str) -> None:
    """One layer has experts; a checkpointed one sends its tokens again."""
    found = along("ep", traffic(MOE, dp_shard=4, ep=4, activation_checkpointing=checkpointing))
    phases = (F, B) if checkpointing == "none" else (F, R, B)
    assert found == {(phase, ALL_TO_ALL, "ep", 4, ROUTED): 2 for phase in phases}


def test_experts_under_tensor_parallelism_get_a_part_of_the_tokens() -> None:
    found = along("ep", traffic(MOE, dp_shard=4, ep=2, tp=2))
    assert found == {(phase, ALL_TO_ALL, "ep", 2, ROUTED / 2): 2 for phase in (F, B)}


def test_the_busiest_rank_of_experts_gets_more_tokens() -> None:
    found = along("ep", traffic(MOE, dp_shard=4, ep=4, expert_imbalance=1.5))
    assert {phase for phase, *_, size in found if size == ROUTED * 1.5} == {F, B}


def test_experts_are_sharded_over_the_ranks_that_have_the_same_ones() -> None:
    """Of 4 data-parallel ranks, 2 x 2 have the same experts; everything else is sharded over all 4."""
    found = traffic(MOE, dp_shard=4, ep=2)
    experts = EXPERTS // 2 * 3 * HIDDEN * EXPERT_FFN
    assert along("dp_expert", found) == {
        (F, GATHER, "dp_expert", 2, experts * BF16): 2,
        (B, SCATTER, "dp_expert", 2, experts * FP32): 1,
    }
    attention, router = 4 * HIDDEN * HEADS * HEAD_DIM, HIDDEN * EXPERTS
    rest = attention + router + 3 * HIDDEN * SHARED_FFN + NORMS
    assert along("dp_shard", found)[F, GATHER, "dp_shard", 4, rest * BF16] == 2
    assert along("dp_shard", found)[B, SCATTER, "dp_shard", 4, rest * FP32] == 1
