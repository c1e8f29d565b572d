"""Products of small models have the FLOPs that torch counts on transformers' own modelling code.

The figures are FlopCounterMode's on transformers 5.24 with torch 2.13, experts one by one, of 256 tokens: products with
weights, forward and backward, without those of indexers. Indexers learn from a loss of their own, which transformers
leaves out. Routed experts of LongCat and ZAYA are left out, as the router's choice among experts without weights is
random. ZAYA's convolutions within heads count as products, which torch calls convolutions, and a token of zeros, which
stands before its sequences, does not. Of Zamba's batched products those of its recurrence are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.types import OpKind, Phase
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.layer_parameters import kind_parameters
from forerun.describe.model.parameters import active_parameter_count, parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

SEQ = 256
BASE = {"hidden_size": 256, "vocab_size": 1000, "intermediate_size": 512}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
EXPERTS = {"moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
INDEXER = {"index_topk": 64, "index_head_dim": 32, "index_n_heads": 4}
HEADS4 = {"num_attention_heads": 4, "num_key_value_heads": 4}
HEADS8 = {"num_attention_heads": 8, "num_key_value_heads": 8}
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "longcat_flash": (
        BASE | LATENT | HEADS4
        | {"num_layers": 2, "ffn_hidden_size": 512, "intermediate_size": None, "moe_topk": 4, "n_routed_experts": 16}
        | {"zero_expert_num": 8, "expert_ffn_hidden_size": 128},
        1380384768 - 269942784,
        2760769536 - 2 * 269942784,
    ),
    "hy_v4": (
        BASE | LATENT | EXPERTS | INDEXER | HEADS4
        | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "head_dim": 32},
        857735168 - 2 * 8912896,
        1679818752,
    ),
    "axk2": (
        BASE | LATENT | EXPERTS | INDEXER | HEADS8 | {"num_hidden_layers": 3, "first_k_dense_replace": 1},
        979894272 - 3 * 8912896,
        1906311168,
    ),
    "diffllama": (BASE | HEADS8 | {"num_hidden_layers": 2, "num_key_value_heads": 4}, 735051776, 1470103552),
    "lfm3": (
        BASE | HEADS8 | {"num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 64},
        2280652800,
        4561305600,
    ),
    "inkling_text": (
        BASE | HEADS8 | EXPERTS
        | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32, "swa_num_attention_heads": 8}
        | {"swa_num_key_value_heads": 4, "swa_head_dim": 32, "sliding_window_size": 32, "rel_extent": 64, "d_rel": 8}
        | {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], "dense_mlp_idx": 1, "n_shared_experts": 2},
        850919424 + 201326592,
        1701838848 + 2 * 201326592,
    ),
    "zaya": (
        BASE | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        | {"intermediate_size": None, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 1}
        | {"router_hidden_size": 64},
        358187008 - 100663296 + 12582912 - 32768,
        716341248 - 2 * 100663296 + 2 * 12582912 - 32768,
    ),
    "zamba": (
        BASE | HEADS4 | {"hidden_size": 128, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
        719847424 + 25165824,
        1439694848 + 2 * 25165824,
    ),
    "zamba2": (
        BASE | HEADS4 | {"hidden_size": 128, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
        | {"n_mamba_heads": 4, "mamba_d_state": 16, "adapter_rank": 16, "use_shared_attention_adapter": True},
        773324800,
        1546649600,
    ),
    "jetmoe": (
        BASE | {"num_hidden_layers": 2, "num_key_value_heads": 4, "kv_channels": 32, "num_local_experts": 8}
        | {"num_experts_per_tok": 2},
        1141899264,
        2283798528,
    ),
    "modernbert-decoder": (BASE | HEADS8 | {"num_hidden_layers": 3}, 1171259392, 2342518784),
}  # fmt: skip


def spec_of(name: str) -> ModelSpec:
    return spec_from_config(Fields({"model_type": name} | CASES[name][0], "config.json"), name)


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_that_torch_counts(name: str) -> None:
    program = build(spec_of(name), Plan(seq_len=SEQ, activation_checkpointing="none"), load_cluster("h100-sxm"))
    random = name in ("longcat_flash", "zaya")
    left_out = ("attention.indexer", "ffn.expert_") if random else ("attention.indexer",)
    counted = program.ops.kind == OpKind.GEMM
    counted &= ~np.array([word.startswith(left_out) for word in program.ops.name])
    found = [op_counts(program, {phase})[0] for phase in (Phase.FORWARD, Phase.BACKWARD)]
    assert tuple(float((counts * program.ops.flops)[counted].sum()) for counts in found) == CASES[name][1:]


def test_the_gate_of_a_norm_activates_its_low_rank_alone() -> None:
    """A.X K2: 256 tokens of 16 elements of 2 bytes, read and written; backward reads them and their gradients."""
    program = build(spec_of("axk2"), Plan(seq_len=SEQ, activation_checkpointing="none"), load_cluster("h100-sxm"))
    moved = zip(program.ops.name, program.ops.bytes_read, program.ops.bytes_written, strict=True)
    found = {name: int(read + written) for name, read, written in moved if name.startswith("gelu")}
    assert found == {"gelu": 2 * SEQ * 16 * 2, "gelu.backward": 3 * SEQ * 16 * 2}


def test_products_without_biases_have_no_gradients_of_biases() -> None:
    """torchtitan sums the gradient of a bias in a kernel of its own."""
    for name in ("zamba2", "axk2", "lfm3"):
        plan = Plan(seq_len=SEQ, activation_checkpointing="none", stack="torchtitan")
        assert not [op for op in build(spec_of(name), plan, load_cluster("h100-sxm")).ops.name if "bias" in op], name


def test_differential_attention_runs_over_each_half_of_the_values() -> None:
    def attention(spec: ModelSpec) -> float:
        program = build(spec, Plan(seq_len=SEQ, activation_checkpointing="none"), load_cluster("h100-sxm"))
        counts = op_counts(program, {Phase.FORWARD})[0]
        return float((counts * program.ops.flops)[program.ops.kind == OpKind.ATTENTION].sum())

    plain = dict(CASES["diffllama"][0].items()) | {"model_type": "llama"}
    llama = spec_from_config(Fields(plain, "config.json"), "llama")
    assert attention(spec_of("diffllama")) == 2 * attention(llama)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"cp": 2}, "cp 2 does not run differential attention"),
        ({"tp": 4}, "4 key-value heads in pairs are not divisible by tp 4"),
        ({"attention": "naive"}, "attention naive does not run differential attention"),
    ],
)
def test_pairs_of_heads_are_not_parted(plan: dict[str, Any], why: str) -> None:
    with pytest.raises(ImpossiblePlan, match=why):
        check_plan(spec_of("diffllama"), Plan(seq_len=SEQ, **plan), load_cluster("h100-sxm"))


@pytest.mark.parametrize("name", ["inkling_text", "zaya"])
def test_short_convolutions_are_not_cut(name: str) -> None:
    with pytest.raises(ImpossiblePlan, match=f"cp 2 would cut the sequence that the short convolutions of {name}"):
        check_plan(spec_of(name), Plan(seq_len=SEQ, cp=2), load_cluster("h100-sxm"))


def test_files_of_inkling_on_the_hub_have_older_names() -> None:
    older = {"dense_intermediate_size": 512, "intermediate_size": 128, "moe_intermediate_size": None}
    older |= {"sconv_kernel_size": 4, "layer_types": None, "local_layer_ids": [0, 2], "model_type": "inkling_text"}
    read = spec_from_config(Fields(CASES["inkling_text"][0] | older, "config.json"), "inkling_text")
    assert read == spec_of("inkling_text")
    whole = {"model_type": "inkling_mm_model", "audio_config": {}, "text_config": CASES["inkling_text"][0] | older}
    assert spec_from_config(Fields(whole, "config.json"), "inkling_text") == read


def test_layers_that_share_a_block_hold_its_weights_once() -> None:
    spec = spec_of("zamba2")
    one, again = (kind_parameters(spec.layer(number)) for number in (1, 3))
    block = spec.layer(1).shared_block
    assert block is not None
    shared = 256 * 3 * 256 + 256 * 128 + 3 * 128 * 512 + 256 + 128
    assert one["shared_block"] - again["shared_block"] == shared
    assert again["shared_block"] == 128 * 128 + 3 * (256 + 256) * 16 + (128 + 2 * 512) * 16
    with pytest.raises(ForerunError, match="n_heads a multiple of n_kv_heads"):
        replace(block, n_kv_heads=3)
    with pytest.raises(ImpossiblePlan, match="pp 2 would part the layers of zamba2 that share the weights of a block"):
        check_plan(spec, Plan(seq_len=SEQ, pp=2, n_microbatches=2), load_cluster("h100-sxm"))


def test_experts_of_an_attention_are_whole_on_every_rank() -> None:
    spec = spec_of("jetmoe")
    assert parameter_count(spec) - active_parameter_count(spec) == 2 * 6 * 256 * (2 * 128 + 3 * 512)
    with pytest.raises(ImpossiblePlan, match="tp 2 does not split the 8 experts of the attention of jetmoe"):
        check_plan(spec, Plan(seq_len=SEQ, tp=2), load_cluster("h100-sxm"))
    with pytest.raises(ForerunError, match="attention_experts need at least n_heads / n_kv_heads"):
        replace(spec, attention_experts=1)


def test_specs_with_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ForerunError, match="differential needs even n_heads"):
        replace(spec_of("diffllama"), n_kv_heads=1)
    latent = spec_of("axk2").mla
    assert latent is not None
    with pytest.raises(ForerunError, match="gated_query needs a q_lora_rank"):
        replace(latent, q_lora_rank=None)


def test_tensor_parallel_ranks_gather_latent_vectors_and_not_hidden_states() -> None:
    plan = Plan(seq_len=SEQ, tp=2, activation_checkpointing="none")
    ops = build(spec_of("axk2"), plan, load_cluster("h100-sxm")).ops
    sizes = {str(name): float(size) for name, size in zip(ops.name, ops.bytes_comm, strict=True)}
    assert sizes["attention.q_up.enter.gather"] == 2 * SEQ * 2 * 64
    assert sizes["attention.kv_up.enter.gather"] == 2 * SEQ * 32
