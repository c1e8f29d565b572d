"""Compressed keys and grouped outputs (DeepSeek-V4) in files and in Programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.types import OpKind, Phase
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.compressed import CompressedSpec
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.parameters import compute_parameter_count, model_flops_per_token
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

CLUSTER = load_cluster("h100-sxm")
SMALL: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 64,
    "q_lora_rank": 64,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "sliding_window": 32,
    "vocab_size": 1000,
    "compress_ratios": [0, 4, 128, 4],
}
SEQ = 256


def spec_of(**changes: Any) -> ModelSpec:
    return spec_from_config(Fields(SMALL | changes, "config.json"), "small")


def flops_of(spec: ModelSpec, phase: Phase, kind: OpKind, prefix: str = "") -> float:
    program = build(spec, Plan(seq_len=SEQ, activation_checkpointing="none"), CLUSTER)
    names = np.array([name.startswith(prefix) for name in program.ops.name])
    counts = op_counts(program, {phase})[0]
    return float((counts * program.ops.flops)[names & (program.ops.kind == kind)].sum())


@pytest.mark.parametrize(
    ("rate", "seq", "most"), [(4, 64, None), (4, 67, 5), (128, 1000, None), (4, 3, 2), (4, 64, 16)]
)
def test_a_query_reads_entries_whose_tokens_have_all_come(rate: int, seq: int, most: int | None) -> None:
    read = [min((place + 1) // rate, seq if most is None else most) for place in range(seq)]
    spec = CompressedSpec(8, 8, 1, 1, rate)
    assert spec.mean_entries(seq, most) == sum(read) / seq
    keys = [min(place + 1, 7) + one for place, one in enumerate(read)]
    assert spec.mean_keys(seq, 7, most) == pytest.approx(sum(keys) / seq)


def test_products_are_those_that_torch_counts() -> None:
    # FlopCounterMode on transformers 5.24's model of these sizes, without the scores of attention and indexers
    forward, backward = 1136656384 + 4 * 8388608, 2187329536 + 8 * 8388608
    scores = 2 * SEQ * 32 * 4 * 32 * 2  # of two indexers, over the half of 64 entries that lies before a query
    assert flops_of(spec_of(), Phase.FORWARD, OpKind.GEMM) == forward + scores
    indexers = flops_of(spec_of(), Phase.BACKWARD, OpKind.GEMM, "attention.indexer")
    assert flops_of(spec_of(), Phase.BACKWARD, OpKind.GEMM) == backward + indexers
    products = 64 * 4 * 32 + 256 * 4 + 2 * 256 * 2 * 32  # weights alone, in each of two layers
    assert indexers == 2 * 2 * SEQ * products + 2 * scores


def test_attention_reads_a_window_and_the_entries_that_an_indexer_chooses() -> None:
    def pairs(ratios: list[int], **changes: Any) -> float:
        spec = spec_of(compress_ratios=ratios, num_hidden_layers=len(ratios), num_hash_layers=0, **changes)
        return flops_of(spec, Phase.FORWARD, OpKind.ATTENTION) / (4 * 8 * 64 * SEQ)

    assert pairs([0]) == 30  # 32 but for the first tokens
    assert pairs([128]) == 30 + 1  # entries 0, 1 and 2
    assert pairs([4]) == 30 + 14  # 16 but for the first tokens
    assert pairs([4], index_topk=512) == 30 + 32
    full = model_flops_per_token(spec_of(), SEQ) - 6 * compute_parameter_count(spec_of())
    assert full == pytest.approx(12 * 8 * 64 * (30 + 44 + 31 + 44), rel=0.02)


def test_words_and_numbers_make_the_same_model() -> None:
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    newer = {
        "compress_ratios": None,
        "layer_types": ["sliding_attention", sparse, heavy, sparse],
        "compress_rates": {sparse: 4, heavy: 128},
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    }
    spec = spec_of(**newer)
    assert spec == spec_of(num_hash_layers=2)
    assert [kind.router_bias for number in range(4) if (kind := spec.layer(number).moe)] == [False, False, True, True]
    usual = spec_of(compress_ratios=None)
    assert [one.rate for n in range(4) if (one := usual.layer(n).compressed)] == [128, 128, 128, 4]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compress_ratios": [0, 4, 64, 4]}, "compress_ratios 64 is not supported"),
        ({"o_groups": 3}, "n_heads 8 is not a multiple of out_groups 3"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported, only 1"),
        ({"layer_types": ["full_attention"] * 4}, "'full_attention' is not supported"),
    ],
)
def test_other_architectures_are_refused_in_one_line(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ForerunError) as caught:
        spec_of(**changes)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_spec_needs_what_it_reads() -> None:
    with pytest.raises(ForerunError, match="overlapping needs a rate"):
        CompressedSpec(8, 8, 1, 1, overlapping=True)
    with pytest.raises(ForerunError, match="one key head and a sliding_window"):
        replace(spec_of(), sliding_window=None)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"cp": 2}, "cp 2 would cut the sequence whose tokens the compressed keys of small stand for"),
        ({"tp": 4}, "2 groups of the attention's output are not divisible by tp 4"),
        ({"attention": "naive"}, "attention naive computes all scores; compressed keys need a fused kernel"),
        ({"document_lengths": (128, 128)}, "would stand for tokens of several documents"),
    ],
)
def test_parallelism_that_does_not_apply_is_refused(plan: dict[str, Any], why: str) -> None:
    with pytest.raises(ImpossiblePlan, match=why):
        check_plan(spec_of(), Plan(seq_len=SEQ, **plan), CLUSTER)


def test_tensor_parallel_ranks_gather_keys_and_split_groups() -> None:
    program = build(spec_of(), Plan(seq_len=SEQ, tp=2, activation_checkpointing="none"), CLUSTER)
    sizes = zip(program.ops.name, program.ops.bytes_comm, strict=True)
    gathered = {float(size) for name, size in sizes if name == "attention.keys.enter.gather"}
    assert gathered == {SEQ * 2 * (64 + more) for more in (0, 16, 1)}  # keys alone, or with an entry of 4 or 128 tokens
    groups = flops_of(spec_of(), Phase.FORWARD, OpKind.GEMM, "attention.out_groups")
    counts, names = op_counts(program, {Phase.FORWARD})[0], np.array(program.ops.name)
    assert float((counts * program.ops.flops)[names == "attention.out_groups"].sum()) == groups / 2
