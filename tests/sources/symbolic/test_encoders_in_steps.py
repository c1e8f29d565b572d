"""Encoders in a step: the products that torch counts, where they run, what they keep, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.types import OpKind, Phase, Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.inputs import with_inputs
from forerun.describe.model.parameters import encoder_parameter_count, model_flops_per_token, parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build
from forerun.sources.symbolic.training_state import trained_elements

H100 = load_cluster("h100-sxm")
SEQ = 256
T5 = {
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 512,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 1000,
}
BART = {
    "d_model": 256, "encoder_ffn_dim": 512, "decoder_ffn_dim": 768, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip
COUNTED = {
    "t5": (T5, 128, 1087373312, 2174746624),
    "mt5": (T5 | {"feed_forward_proj": "gated-gelu"}, 128, 1355808768, 2711617536),
    "bart": (BART, 128, 1708130304, 3416260608),
    "whisper": (BART, 1500, 6622871552, 12877103104),
}
"""keys, tokens of the encoder, and FLOPs of products forward and backward of 256 tokens: those of FlopCounterMode on
transformers 5.24 with torch 2.13; the stem of Whisper has no gradient of its input"""


def small(name: str) -> ModelSpec:
    keys, tokens, *_ = COUNTED[name]
    spec = spec_from_config(Fields({"model_type": name, **keys}, "config.json"), name)
    return with_inputs(spec, tokens=tokens)


def tower(**given: Any) -> ModelSpec:
    """A small LLaVA: 4 layers of 64 on 16 patches and a class token, which become 16 tokens."""
    text = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    }
    config = {"model_type": "llava", "text_config": text, "vision_config": vision | {"model_type": "clip_vision_model"}}
    return with_inputs(spec_from_config(Fields(config, "config.json"), "llava"), **{"inputs": 2, **given})


def plan(**fields: Any) -> Plan:
    return Plan(**{"seq_len": SEQ, "activation_checkpointing": "none", **fields})


def products(program: Program, phase: Phase) -> float:
    counts = op_counts(program, {phase})[0]
    return float((counts * program.ops.flops)[program.ops.kind == OpKind.GEMM].sum())


@pytest.mark.parametrize("name", COUNTED)
def test_products_are_those_that_torch_counts(name: str) -> None:
    program = build(small(name), plan(), H100)
    assert (products(program, Phase.FORWARD), products(program, Phase.BACKWARD)) == COUNTED[name][2:]


def test_products_of_a_tower_are_those_of_its_matrices() -> None:
    """2 images of 17 tokens: 16 patches of 588 values, 4 layers, and a projector on 16 tokens."""
    with_images, alone = (build(tower(inputs=n), plan(), H100) for n in (2, 0))
    layers = 4 * (4 * 64 * 64 + 2 * 64 * 128) * 17
    stem, projector = 588 * 64 * 16, (64 * 256 + 256 * 256) * 16
    forward = 2 * 2 * (layers + stem + projector)
    assert products(with_images, Phase.FORWARD) - products(alone, Phase.FORWARD) == forward
    assert products(with_images, Phase.BACKWARD) - products(alone, Phase.BACKWARD) == 2 * forward - 2 * 2 * stem


def test_a_frozen_tower_runs_forward_alone_and_its_projector_is_trained() -> None:
    frozen, alone = build(tower(frozen=True), plan(), H100), build(tower(inputs=0), plan(), H100)
    projector = 2 * 2 * (64 * 256 + 256 * 256) * 16
    assert products(frozen, Phase.BACKWARD) - products(alone, Phase.BACKWARD) == 2 * projector
    assert "encoder" in frozen.modules
    assert "encoder" not in alone.modules


def test_a_frozen_tower_has_neither_gradients_nor_optimizer_states() -> None:
    stack = load_stack("torchtitan")
    trained, frozen = (trained_elements(tower(frozen=still), plan(), H100, stack)[0] for still in (False, True))
    encoder = tower().encoder
    assert encoder is not None
    projector = 64 * 256 + 256 + 256 * 256 + 256
    assert trained - frozen == encoder_parameter_count(encoder) - projector


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("stack", ["torchtitan", "pytorch", "megatron-core", "deepspeed"])
def test_every_parameter_is_trained_once(name: str, stack: str) -> None:
    of_ranks = trained_elements(small(name), plan(stack=stack, zero_stage=0), H100, load_stack(stack))
    padded = load_stack(stack).padded_vocab_multiple
    more = (-(-1000 // padded) * padded - 1000) * 256
    assert of_ranks == (parameter_count(small(name)) + more,)


@pytest.mark.parametrize("fields", [
    {"dp_shard": 4}, {"dp_replicate": 4, "zero_stage": 0}, {"tp": 2, "dp_shard": 2}, {"compile": True, "dp_shard": 2},
    {"tp": 2, "sequence_parallel": True}, {"dp_shard": 2, "activation_checkpointing": "full"},
    {"dp_shard": 2, "n_microbatches": 3}, {"attention": "naive"}, {"attention": "flex_uncompiled"},
    {"lora_rank": 8, "dp_shard": 2}, {"stack": "megatron-core", "tp": 2, "dp_shard": 2}, {"activation_offload": 0.5},
    {"stack": "simple-fsdp", "dp_shard": 2}, {"activation_checkpointing": "selective", "dp_shard": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("which", ["t5", "whisper", "tower", "frozen"])
def test_a_step_leaves_no_memory_behind_and_adds_up(which: str, fields: dict[str, Any]) -> None:
    spec = {"tower": tower(), "frozen": tower(frozen=True)}.get(which) or small(which)
    own = plan(**{"micro_batch": 2, **fields})
    check_plan(spec, own, H100)
    found = simulate_setup(Setup(spec, own, H100, replays=True))
    for rank_class in found.program.rank_classes:
        change = 0
        for number in rank_class.block:
            block = found.program.blocks[number]
            change += int(block.tensor_bytes @ ((block.tensor_free < 0).astype(np.int64) - (block.tensor_alloc < 0)))
        assert change == 0
    assert 0 < (found.prediction.hfu or 0) < 1
    assert found.prediction.peak_reserved_gib >= found.prediction.peak_allocated_gib


def test_flops_are_conserved_under_tensor_parallelism() -> None:
    for spec in (small("t5"), small("bart")):
        whole, halves = build(spec, plan(), H100), build(spec, plan(tp=2), H100)
        head = 2 * SEQ * 256 * (2 * 504 - 1000) if spec.vocab % 2 else 0
        assert 2 * products(halves, Phase.FORWARD) == products(whole, Phase.FORWARD) + head


def test_mfu_counts_the_encoder() -> None:
    spec, own = with_inputs(load_model("qwen3-vl-8b"), 2), plan(seq_len=4096, dp_shard=8)
    found = simulate_setup(Setup(spec, own, H100, replays=True))
    step, flops = found.prediction.step_time_s, model_flops_per_token(spec, 4096) * 4096
    assert found.prediction.mfu == pytest.approx(flops / step / 989.4e12, rel=1e-3)
    assert found.prediction.hfu == pytest.approx(found.prediction.mfu, rel=1e-9)


@pytest.mark.parametrize(
    ("which", "fields", "message"),
    [
        ("t5", {"cp": 2}, "cp 2: an encoder with a decoder runs without context parallelism"),
        ("t5", {"pp": 2}, "pp 2: an encoder with a decoder runs without pipeline stages, as all of its layers read"),
        ("t5", {"document_lengths": (128,)}, "document_lengths: an encoder with a decoder runs without packed"),
        ("tower", {"cp": 2}, "cp 2: a tower runs without context parallelism"),
        ("tower", {"reference": True}, "reference: a tower runs without a reference model"),
        ("tower", {"seq_len": 16}, "seq_len 16: 2 images take 32 tokens of each sequence; take a longer one, or fewer"),
    ],
)
def test_what_an_encoder_does_not_run_under_is_refused(which: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ImpossiblePlan) as error:
        check_plan(tower() if which == "tower" else small(which), plan(**fields), H100)
    assert message in str(error.value)


def test_a_tower_stands_on_the_first_pipeline_stage() -> None:
    program = build(tower(), plan(pp=2, n_microbatches=4), H100)
    names = [{program.blocks[number].name for number in rank.block} for rank in program.rank_classes]
    first, last = (any(name.startswith("encoder.") for name in each) for each in names)
    assert (first, last) == (True, False)
