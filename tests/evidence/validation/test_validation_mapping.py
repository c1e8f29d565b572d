"""From the words of a row to a plan, a model and a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measured_rows import measurement

from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan import rules
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.validation.hardware import HostFacts, read_hardware
from forerun.evidence.validation.mapping import Inexpressible, Inputs, map_row, to_inputs
from forerun.evidence.validation.plan_mapping import _usual_chunks
from forerun.evidence.validation.wording import named_stack

MODEL = ModelSpec(
    name="Small-Llama", n_layers=16, hidden=2048, n_heads=16, n_kv_heads=8, head_dim=128, ffn_hidden=5632, vocab=32000
)
HOSTS = {"lab-h100": HostFacts(gpu="H100-SXM", inter_node_gbit_s_per_gpu=100.0)}


def mapped(tmp_path: Path, **change: str) -> Inputs:
    return map_row(measurement(tmp_path, **change), {"Small-Llama": MODEL}, HOSTS)


def plan(tmp_path: Path, **change: str) -> Plan:
    return mapped(tmp_path, **change).plan


def reason(tmp_path: Path, **change: str) -> str:
    with pytest.raises(Inexpressible) as error:
        mapped(tmp_path, **change)
    assert "\n" not in str(error.value)
    return str(error.value)


def megatron(**change: str) -> dict[str, str]:
    """A 16-GPU Megatron layout: 4 stages of TP 2, two data-parallel ranks."""
    return {
        "framework": "Megatron-LM", "software": "2021", "zero_stage": "0", "dp_replicate": "2", "dp_shard": "1",
        "tp": "2", "pp": "4", "pp_schedule": "1F1B", "global_batch_seqs": "16", "micro_batch": "1",
        "n_microbatches": "8", "grad_accum": "1", "attention_kernel": "naive(fused softmax)",
        "optimizer": "adam_fused(distributed)", **change,
    }  # fmt: skip


def test_a_complete_row_needs_no_assumption(tmp_path: Path) -> None:
    inputs = mapped(tmp_path)
    assert inputs.notes == ()
    assert inputs.model == MODEL
    p = inputs.plan
    assert (p.world_size, p.global_batch, p.zero_stage, p.reduce_dtype) == (16, 32, 3, "fp32")
    assert (p.attention, p.optimizer, p.optimizer_impl, p.stack) == ("sdpa", "adamw", "fused", "torchtitan")
    assert (inputs.cluster.device.peak("bf16"), inputs.cluster.node_size) == (989.4e12, 8)
    assert to_inputs(measurement(tmp_path), {"Small-Llama": MODEL}, HOSTS) == (MODEL, p, inputs.cluster)


@pytest.mark.parametrize(
    ("framework", "software", "notes", "stack"),
    [
        ("llm-foundry/Composer FSDP1", "torch 2.1.0", "", "composer"),
        ("llm-foundry/Composer FSDP1", "torch 1.13/2.0 era", "", "composer-torch2.0"),
        ("torchtitan FSDP2", "", "", "torchtitan-0.1"),
        ("torchtitan FSDP2", "torchtitan at that commit", "", "torchtitan-0.1"),
        ("torchtitan FSDP2", "torch 2.14.0a0+gitd9abf9e", "", "torchtitan"),
        ("torchtitan FSDP2", "torch 2.9.0.dev20250815+cu128, torchtitan 6fc499f", "", "torchtitan-2025-08"),
        ("torchtitan FSDP2", "torchtitan 2025-09", "", "torchtitan-2025-08"),
        ("torchtitan FSDP2", "torch 2.9.0", "", "torchtitan-0.2"),
        ("torchtitan FSDP2", "torchtitan 2025-10", "", "torchtitan-0.2"),
        ("torchtitan FSDP2", "torch 2.8.0a0+5228986c39", "", "torchtitan-0.1"),
        ("torchtitan FSDP2", "torchtitan Aug 2024", "", "torchtitan-2024"),
        ("torchtitan SimpleFSDP", "torchtitan 2025-11", "", "torchtitan-simple-fsdp"),
        ("torchtitan SimpleFSDP (aot_eager)", "torchtitan 2025-11", "", "torchtitan-aot-eager"),
        ("torchtitan SimpleFSDP / compiler toolkit", "torchtitan 2026-02", "", "torchtitan-graph"),
        ("torchtitan graph_trainer (SimpleFSDP)", "", "", "torchtitan-graph"),
        ("SimpleFSDP (a script)", "", "", "simple-fsdp"),
        ("Megatron-LM", "", "", "megatron-lm"),
        ("Megatron-LM", "TransformerEngine 1.1", "", "megatron-core"),
        ("Megatron-LM 0.14-dev + TransformerEngine", "", "", "megatron-core"),
        ("Megatron-LM / Megatron-Core r0.8", "", "tp-comm-overlap on", "nemo"),
        ("Megatron-LM fork (Kwai)", "TransformerEngine 1.1", "", "megatron-kwai"),
        ("Megatron-DeepSpeed", "2022", "", "megatron-lm"),
        ("Megatron-DeepSpeed", "BigScience fork", "", "megatron-deepspeed"),
        ("Megatron-Bridge / Megatron-Core", "NeMo container", "", "nemo"),
        ("NeMo / Megatron-Core", "NeMo 24.07", "", "nemo-2024"),
        ("NeMo / Megatron-Core", "NeMo 23.11 container", "", "nemo-2024"),
        ("NeMo / Megatron-Core", "NeMo 23.04 container", "", "nemo-2023"),
        ("NeMo / Megatron-Core", "NeMo 24.04 container", "", "nemo"),
        ("NeMo / Megatron-Core", "NeMo 24.09 container", "", "nemo"),
        ("DeepSpeed ZeRO-3", "", "", "deepspeed"),
        ("PyTorch FSDP1 (fms-fsdp)", "", "", "fms-fsdp"),
        ("Lit-GPT + Lightning FSDP", "", "", "fms-fsdp"),
        ("flash-attention training (PyTorch Lightning DDP)", "", "", "lightning-ddp"),
        ("InternEvo", "", "", "internevo"),
        ("nanotron", "", "", "nanotron"),
        ("PyTorch FSDP1 (accelerate)", "torch 2.3, accelerate 0.30", "", "transformers-4"),
        ("transformers FSDP", "torch 2.13, transformers 5.24", "", "transformers"),
        ("DeepSpeed ZeRO-3 (accelerate)", "DeepSpeed 0.14", "", "transformers-deepspeed"),
        ("torchtune", "torch 2.6", "", "torchtune"),
        ("PyTorch DDP", "torch 2.5.0+cu124", "", "pytorch-ddp"),
        ("nanoGPT", "torch 2.0", "", "pytorch-ddp"),
        ("PyTorch", "torch 2.6", "", "pytorch-ddp"),
        ("PyTorch FSDP2", "torch 2.9.0", "", "torchtitan-0.2"),
        ("PyTorch FSDP", "torch 2.4", "", "fms-fsdp"),
        ("LitGPT (Fabric FSDP)", "", "", "fms-fsdp"),
        ("FSDP2 around LitGPT", "torch 2.6", "", "torchtitan-0.1"),
        ("OLMo", "2024", "", "fms-fsdp"),
        ("OLMo-core", "torch 2.9", "", "torchtitan-0.2"),
        ("GPT-NeoX", "", "", "megatron-lm"),
        ("ms-swift", "", "", "transformers-4"),
        ("open-instruct with DeepSpeed ZeRO-3", "", "", "transformers-deepspeed"),
    ],
)
def test_stack_by_its_words(tmp_path: Path, framework: str, software: str, notes: str, stack: str) -> None:
    assert named_stack(measurement(tmp_path, framework=framework, software=software, notes=notes)) == stack


def test_unknown_software_is_taken_as_the_nearest_and_says_so(tmp_path: Path) -> None:
    inputs = mapped(tmp_path, framework="Our own trainer")
    assert inputs.plan.stack == "other"
    assert inputs.notes == ("software Our own trainer: taken as other",)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"micro_batch": "2", "n_microbatches": "", "grad_accum": ""}, (2, 1)),
        ({"micro_batch": "", "n_microbatches": "2"}, (1, 2)),
        ({"n_microbatches": ""}, (1, 2)),
        ({"micro_batch": "4", "n_microbatches": "", "grad_accum": "", "global_batch_seqs": ""}, (4, 1)),
        (megatron(micro_batch="", n_microbatches=""), (1, 8)),
        ({"micro_batch": "2", "n_microbatches": "3", "global_batch_seqs": "80"}, (2, 3)),
    ],
)
def test_batch_is_derived_from_what_is_stated(
    tmp_path: Path, change: dict[str, str], expected: tuple[int, int]
) -> None:
    p = plan(tmp_path, **change)
    assert (p.micro_batch, p.n_microbatches) == expected


def test_a_smaller_last_micro_batch_is_noted(tmp_path: Path) -> None:
    notes = mapped(tmp_path, micro_batch="2", n_microbatches="3", global_batch_seqs="80").notes
    assert notes == ("the last micro batch is smaller (80 of 96 sequences): taken as full",)


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        (
            {"micro_batch": "4", "n_microbatches": "", "grad_accum": "", "global_batch_seqs": ""},
            ("global_batch_seqs not stated: one micro batch per step",),
        ),
        (
            {"param_dtype": "fp32"},
            ("weights are gathered in fp32 and cast for each use: gathers taken in the compute dtype",),
        ),
        (
            {"tp": "2", "dp_shard": "8", "global_batch_seqs": "16", "sp": ""},
            ("sp not stated: taken as the stack's own",),
        ),
        (
            megatron(sp="", pp_virtual_stages=""),
            ("pp_virtual_stages not stated: taken as 1", "sp not stated: taken as the stack's own"),
        ),
        (
            megatron(pp_schedule="interleaved_1f1b", pp_virtual_stages="", sp="no"),
            ("pp_virtual_stages not stated: taken as 2",),
        ),
        (megatron(pp_schedule="", pp_virtual_stages="1", sp="no"), ("pp_schedule not stated: taken as 1F1B",)),
    ],
)
def test_what_is_taken_as_usual_is_noted(tmp_path: Path, change: dict[str, str], notes: tuple[str, ...]) -> None:
    assert mapped(tmp_path, **change).notes == notes


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, False),
        (megatron(param_dtype="fp32"), True),
        (megatron(param_dtype="fp32", dp_shard=""), True),
        (megatron(param_dtype="fp32", precision="fp32"), False),
        (megatron(param_dtype="bf16"), False),
        ({"param_dtype": "fp32"}, False),
    ],
)
def test_fp32_weights_that_nobody_shards_are_cast_by_autocast(
    tmp_path: Path, change: dict[str, str], expected: bool
) -> None:
    assert bool(plan(tmp_path, **change).autocast) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_gpus": "32"}, "= 16, but n_gpus is 32"),
        ({"global_batch_seqs": "64"}, "data-parallel ranks = 32, but global_batch_seqs is 64"),
        ({"micro_batch": "", "global_batch_seqs": ""}, "neither micro_batch nor global_batch_seqs"),
        ({"seq_len": ""}, "seq_len is not stated"),
        (
            {"micro_batch": "", "n_microbatches": "", "grad_accum": "", "global_batch_seqs": "40"},
            "not a multiple of 16",
        ),
        ({"micro_batch": "3", "n_microbatches": "", "grad_accum": ""}, "do not split into micro batches of 3"),
        ({"ep": "3"}, "ep 3 does not divide"),
        ({"precision": "int4"}, "precision 'int4' is not known"),
        ({"activation_checkpointing": "sometimes"}, "activation_checkpointing 'sometimes'"),
        ({"cpu_offload": "everything"}, "cpu_offload 'everything'"),
        ({"gpu": "Abacus"}, "unknown device 'Abacus'"),
        (megatron(pp_schedule="zigzag"), "pp_schedule 'zigzag'"),
        ({"model": "Other", "is_moe": "yes"}, "model 'Other' has experts"),
        ({"model": "Other", "hidden": ""}, "the row lacks hidden"),
        ({"model": "Other", "n_kv_heads": "3"}, "not a multiple of n_kv_heads 3"),
    ],
)
def test_what_cannot_be_expressed_says_why(tmp_path: Path, change: dict[str, str], message: str) -> None:
    assert message in reason(tmp_path, **change)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"zero_stage": "2"}, (3, "never")),
        ({"notes": "reshard_after_forward=always."}, (3, "always")),
        (megatron(zero_stage="2", dp_replicate="1", dp_shard="2"), (2, "default")),
        ({"zero_stage": ""}, (1, "default")),
        (megatron(zero_stage=""), (0, "default")),
    ],
)
def test_sharding(tmp_path: Path, change: dict[str, str], expected: tuple[int, str]) -> None:
    p = plan(tmp_path, **change)
    assert (p.zero_stage, p.reshard_after_forward) == expected


def test_unsharded_state_is_replication(tmp_path: Path) -> None:
    p = plan(tmp_path, zero_stage="0")
    assert (p.dp_replicate, p.dp_shard, p.zero_stage) == (16, 1, 0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"pp_virtual_stages": "1"}, ("1F1B", 1)),
        ({"pp_schedule": "interleaved_1F1B", "pp_virtual_stages": "4"}, ("Interleaved1F1B", 4)),
        ({"pp_schedule": "interleaved_1F1B", "pp_virtual_stages": "1"}, ("1F1B", 1)),
        ({"pp_schedule": "interleaved_1F1B", "pp_virtual_stages": ""}, ("Interleaved1F1B", 2)),
        ({"pp_schedule": "", "pp_virtual_stages": ""}, ("1F1B", 1)),
        ({"pp_schedule": "GPipe"}, ("GPipe", 1)),
        ({"pp_schedule": "AFAB"}, ("GPipe", 1)),
        ({"pp_schedule": "Interleaved 1F1B", "pp_virtual_stages": "4"}, ("Interleaved1F1B", 4)),
        ({"pp_schedule": "zero bubble (ZB-H1)"}, ("ZB1P", 1)),
        ({"pp_schedule": "ZBVZeroBubble"}, ("ZBV", 2)),
        ({"pp_schedule": "DualPipe"}, ("DualPipe", 2)),
        ({"pp_schedule": "dual pipe v", "pp_virtual_stages": "2"}, ("DualPipeV", 2)),
    ],
)
def test_pipeline_schedule(tmp_path: Path, change: dict[str, str], expected: tuple[str, int]) -> None:
    p = plan(tmp_path, **megatron(**change))
    assert (p.pp_schedule, p.virtual_stages) == expected


def uneven(tmp_path: Path, layers: int, **change: str) -> Plan:
    row = measurement(tmp_path, **megatron(n_layers=str(layers), **change))
    return map_row(row, {"Small-Llama": replace(MODEL, n_layers=layers)}, HOSTS).plan


@pytest.mark.parametrize(
    ("layers", "stages", "chunks"),
    [(16, 4, 2), (12, 4, 3), (20, 4, 5), (10, 4, 3), (18, 4, 5), (9, 4, 2), (4, 4, 2), (3, 2, 2)],
)
def test_interleaved_stages_have_the_fewest_chunks_that_split_layers_evenly(
    layers: int, stages: int, chunks: int
) -> None:
    """Or layers with embedding and head counted."""
    assert _usual_chunks(layers, stages) == chunks


def test_layers_over_stages(tmp_path: Path) -> None:
    assert (uneven(tmp_path, 16).layers_per_stage, uneven(tmp_path, 16).balance_ends) == (None, False)
    assert uneven(tmp_path, 18).balance_ends  # 18 + 2 divide by 4, 18 alone does not
    assert not uneven(tmp_path, 17).balance_ends
    short = uneven(tmp_path, 18, notes="Layers do not divide evenly (last stage short).")
    assert (short.layers_per_stage, short.balance_ends) == ((5, 5, 5, 3), False)
    assert uneven(tmp_path, 16, notes="PP partition type:transformer|embedding").balance_ends


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"precision": "amp_bf16", "grad_reduce_dtype": "bf16"}, ("bf16", "bf16", "bf16")),
        ({"precision": "fp32"}, ("fp32", "fp32", "fp32")),
        ({"grad_reduce_dtype": ""}, ("bf16", "fp32", "fp32")),
        ({"framework": "InternEvo", "grad_reduce_dtype": ""}, ("bf16", "bf16", "bf16")),
        (megatron(precision="fp16", grad_reduce_dtype=""), ("fp16", "fp16", "fp16")),
        (megatron(grad_reduce_dtype=""), ("bf16", "fp32", "fp32")),
        (megatron(precision="fp16", grad_reduce_dtype="fp32"), ("fp16", "fp32", "fp32")),
        ({"notes": "fp32 gradient accumulation", "grad_reduce_dtype": "bf16"}, ("bf16", "bf16", "fp32")),
        ({"notes": "fp16 with fp16 gradients", "precision": "fp16"}, ("fp16", "fp32", "fp16")),
    ],
)
def test_dtypes(tmp_path: Path, change: dict[str, str], expected: tuple[str, str, str]) -> None:
    p = plan(tmp_path, **change)
    stack = load_stack(p.stack)
    assert (p.precision, rules.reduce_dtype(p, stack), rules.accumulate_dtype(p, stack)) == expected
    assert p.master_dtype == "fp32"


@pytest.mark.parametrize(
    ("precision", "text", "expected"),
    [
        ("fp8", "torchao float8 tensorwise, fp8 all-gather, precomputed scales", ("tensorwise", True)),
        ("fp8", "torchao float8 tensorwise, bf16 all-gather", ("tensorwise", False)),
        ("fp8", "float8 tensorwise (f8 all-gather)", ("tensorwise", True)),
        ("fp8", "rowwise_with_gw_hp with bfloat16 all-gather", ("rowwise", False)),
        ("fp8", "TransformerEngine delayed scaling (hybrid)", ("delayed", False)),
        ("fp8", "TransformerEngine (amp_fp8)", ("delayed", False)),
        ("fp8", "FP8-CS (FP8-MX)", ("tensorwise", False)),
        ("float8", "1x128 and 128x128 blocks", ("block", False)),
        ("fp8", "blockwise scaling", ("block", False)),
        ("fp8", "", ("tensorwise", False)),
        ("mxfp8", "mxfp8_cublas", ("mx", False)),
        ("nvfp4", "", ("mx", False)),
        ("bf16", "", ("none", False)),
    ],
)
def test_fp8(tmp_path: Path, precision: str, text: str, expected: tuple[str, bool]) -> None:
    p = plan(tmp_path, precision=precision, fp8_recipe=text)
    assert (p.fp8_recipe, p.fp8_all_gather) == expected


SELECTIVE_OP = "torchtitan selective op (saves matmul/sdpa/reduce-scatter outputs, every 2nd mm recomputed)"


@pytest.mark.parametrize(
    ("mode", "detail", "expected"),
    [
        ("full", "every layer", ("full", "op", 1)),
        ("full", "per TransformerBlock", ("full", "op", 1)),
        ("full", "separate checkpoint() on attention and MLP of every block", ("selective", "attention+mlp", 1)),
        ("selective", SELECTIVE_OP, ("selective", "op", 1)),
        ("selective", "graph SAC: default_op_list policy", ("selective", "op", 1)),
        ("selective", "torchtitan selective layer (every 2nd layer)", ("full", "op", 2)),
        ("selective", "attention core (softmax, dropout, PV) recomputed", ("selective", "attention", 1)),
        ("selective", "as Megatron-LM (assumed)", ("selective", "attention", 1)),
        ("selective", "recompute MLP activation function and norms only", ("selective", "mlp-act-norm", 1)),
        ("selective", "checkpoint(mlp) only", ("selective", "mlp", 1)),
        ("none", "SimpleFSDP ac_mode: only the parameter all-gather/cast is recomputed", ("selective", "params", 1)),
        ("none", "no recompute in the recipe", ("none", "op", 1)),
        ("", "", ("selective", "op", 1)),
        ("selective", "", ("selective", "op", 1)),
    ],
)
def test_checkpointing(tmp_path: Path, mode: str, detail: str, expected: tuple[str, str, int]) -> None:
    p = plan(tmp_path, activation_checkpointing=mode, ac_detail=detail)
    assert (p.activation_checkpointing, p.selective_policy, p.checkpoint_every) == expected


@pytest.mark.parametrize(
    ("hfu", "every"), [(40 * (1 + 1 / 3), 1), (40 * (1 + 1 / 6), 2), (40 * (1 + 1 / 12), 4), (40.0, 2)]
)
def test_the_checkpointed_fraction_follows_from_hfu_over_mfu(tmp_path: Path, hfu: float, every: int) -> None:
    row = measurement(tmp_path, activation_checkpointing="selective", ac_detail="fraction of blocks not stated")
    row = replace(row, mfu_pct=40.0, hfu_pct=hfu)
    p = map_row(row, {"Small-Llama": MODEL}, HOSTS).plan
    assert (p.activation_checkpointing, p.checkpoint_every) == ("full", every)


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("naive(fused softmax)", "naive"), ("triton_flash", "triton"), ("flex(compiled,max-autotune)", "flex"),
        ("sdpa(flash2, is_causal)", "sdpa"), ("cudnn/TE fused", "te"), ("TE flash/cudnn", "te"),
        ("flash1", "flash1"), ("flash2/TE", "flash2"), ("flash", "flash2"), ("flash-attention 3", "flash3"),
        ("none(model has no attention)", "auto"), ("", "auto"), ("SDPA (cuDNN)", "cudnn"), ("sdpa(math)", "naive"),
        ("eager", "naive"), ("flex eager", "flex_uncompiled"), ("TE unfused", "naive"), ("TE", "te"),
        ("SDPA mem_efficient", "sdpa"), ("mem_efficient", "efficient"), ("CK", "aiter"),
    ],
)  # fmt: skip
def test_attention_kernel(tmp_path: Path, text: str, kernel: str) -> None:
    assert plan(tmp_path, attention_kernel=text).attention == kernel


@pytest.mark.parametrize(
    ("change", "expected", "noted"),
    [
        ({"notes": "LoRA, rank 64 and alpha 128"}, (64, "wide"), False),
        ({"framework": "torchtune QLoRA"}, (16, "nf4"), True),
        ({"notes": "rank-8 LoRA adapters"}, (8, "wide"), False),
        ({"notes": "full fine-tuning, no LoRA"}, (0, "wide"), False),
    ],
)
def test_adapters(tmp_path: Path, change: dict[str, str], expected: tuple[int, str], noted: bool) -> None:
    inputs = mapped(tmp_path, **change)
    assert (inputs.plan.lora_rank, inputs.plan.frozen_dtype) == expected
    assert any(note == "rank of LoRA not stated: taken as 16" for note in inputs.notes) == noted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adamw", ("adamw", "fused")),
        ("adamw_foreach", ("adamw", "foreach")),
        ("decoupled_adamw", ("adamw", "loop")),
        ("adam(distributed)", ("adam", "fused")),
        ("adamw_apex_fused", ("adamw", "fused")),
        ("sgd", ("sgd", "fused")),
        ("", ("adamw", "fused")),
        ("bitsandbytes AdamW 8-bit", ("adamw8bit", "fused")),
        ("8bit_adam", ("adamw8bit", "fused")),
        ("Muon + AdamW", ("muon", "fused")),
        ("Adafactor", ("adafactor", "fused")),
    ],
)
def test_optimizer(tmp_path: Path, text: str, expected: tuple[str, str]) -> None:
    p = plan(tmp_path, optimizer=text)
    assert (p.optimizer, p.optimizer_impl) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no", (False, False)), ("yes", (True, False)), ("yes(fwd+bwd)", (True, False)), ("aot_eager", (True, False)),
        ("yes(model,cudagraphs+autotune)", (True, True)), ("", (False, False)),
    ],
)  # fmt: skip
def test_compile(tmp_path: Path, text: str, expected: tuple[bool, bool]) -> None:
    p = plan(tmp_path, torch_compile=text)
    assert (p.compile, p.cuda_graphs) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ("none", 0.0)),
        ("activations: fraction 0.4 of saved activations offloaded to host", ("none", 0.4)),
        ("activations (4-8 layers, recipe)", ("none", 6 / 16)),
        ("optimizer states", ("optimizer", 0.0)),
        ("parameters", ("params", 0.0)),
    ],
)
def test_offload(tmp_path: Path, text: str, expected: tuple[str, float]) -> None:
    p = plan(tmp_path, cpu_offload=text)
    assert (p.offload, p.activation_offload) == expected


@pytest.mark.parametrize(
    ("change", "method"),
    [
        ({}, "allgather"),
        ({"notes": "CP = ring attention (TE p2p)"}, "ring"),
        ({"notes": "CP comm a2a (Ulysses style)"}, "ulysses"),
        ({"framework": "NeMo / Megatron-Core"}, "ring"),
    ],
)
def test_context_parallel_method(tmp_path: Path, change: dict[str, str], method: str) -> None:
    p = plan(tmp_path, cp="2", dp_shard="8", micro_batch="2", **change)
    assert (p.cp_method, p.fsdp) == (method, 16)


def test_modules_that_are_recomputed_go_before_a_policy(tmp_path: Path) -> None:
    p = plan(tmp_path, activation_checkpointing="none", ac_detail="RECOMPUTE_MODULES mlp (the three dense layers only)")
    assert (p.activation_checkpointing, p.recompute_modules) == ("selective", ("mlp",))
    p = plan(tmp_path, activation_checkpointing="", ac_detail="recompute_modules moe_act, layernorm")
    assert p.recompute_modules == ("moe_act", "layernorm")


def test_overlap_is_off_where_the_notes_say_so(tmp_path: Path) -> None:
    assert not plan(tmp_path, notes="No TP/DP/P2P overlap; fused cross-entropy").overlap_grad_reduce
    assert plan(tmp_path, notes="GEMM overlap for TP; no CP extras").overlap_grad_reduce


def test_learned_positions_are_as_many_as_the_sequence(tmp_path: Path) -> None:
    row = measurement(tmp_path, seq_len="512")
    learned = replace(MODEL, position="learned")
    assert map_row(row, {"Small-Llama": learned}, HOSTS).model.max_positions == 512


def test_dimensions_of_the_row_win(tmp_path: Path) -> None:
    inputs = mapped(tmp_path, n_layers="12")
    assert inputs.model == replace(MODEL, n_layers=12)
    assert "n_layers" in inputs.notes[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("rmsnorm", "rope", False, False)),
        ({"mlp": "gelu"}, ("layernorm", "learned", True, True)),
        ({"mlp": "gelu", "n_heads": "0", "n_kv_heads": "0", "head_dim": "0"}, ("layernorm", "none", True, False)),
    ],
)
def test_a_model_outside_the_file_is_made_from_the_row(
    tmp_path: Path, change: dict[str, str], expected: tuple[Any, ...]
) -> None:
    model = mapped(tmp_path, model="Other", **change).model
    assert (model.norm, model.position, model.mlp_bias, model.tied_embeddings) == expected
    assert (model.n_layers, model.hidden, model.vocab) == (16, 2048, 32000)


@pytest.mark.parametrize(
    ("gpu", "memory", "peak_tflops", "memory_gib"),
    [
        ("A100-SXM", "40", 312, 40), ("A100-SXM", "80", 312, 80), ("A100-SXM", "", 312, 80),
        ("H100-SXM-HBM2e-500W", "96", 989.4, 94), ("H800-SXM", "80", 989.4, 80), ("MI300X", "192", 1307.4, 192),
        ("H200-SXM", "141", 989.4, 141), ("GB200", "186", 2500, 186), ("RTX4090", "24", 165.2, 24),
    ],
)  # fmt: skip
def test_device_by_name_and_memory(
    tmp_path: Path, gpu: str, memory: str, peak_tflops: float, memory_gib: float
) -> None:
    device = mapped(tmp_path, gpu=gpu, gpu_mem_gb=memory).cluster.device
    assert device.peak("bf16") / 1e12 == pytest.approx(peak_tflops, rel=0.02)
    assert device.memory_bytes == pytest.approx(memory_gib * 2**30, rel=0.08)


def test_the_nvlink_domain_is_the_node(tmp_path: Path) -> None:
    change = {"gpu": "GB200", "gpu_mem_gb": "186", "gpus_per_node": "4"}
    assert mapped(tmp_path, intra_node="NVLink5 NVL72", **change).cluster.node_size == 72
    assert mapped(tmp_path, intra_node="NVLink5", **change).cluster.node_size == 4


@pytest.mark.parametrize(
    ("change", "gbit", "noted"),
    [
        ({}, 400, False),
        ({"inter_node_gbit_s_per_gpu": ""}, 100, False),
        ({"inter_node_gbit_s_per_gpu": "", "hw_key": "elsewhere"}, 400, True),
        ({"inter_node_gbit_s_per_gpu": "", "hw_key": "", "gpu": "A100-SXM"}, 200, True),
        ({"inter_node_gbit_s_per_gpu": "", "hw_key": "", "gpus_per_node": "16"}, 400, False),
    ],
)
def test_network_as_stated_else_as_usual(tmp_path: Path, change: dict[str, str], gbit: float, noted: bool) -> None:
    inputs = mapped(tmp_path, **change)
    assert inputs.cluster.links[-1].bytes_per_s * 8 / 1e9 == pytest.approx(gbit)
    assert any("network between nodes" in note for note in inputs.notes) == noted


def test_a_host_runs_at_the_clock_and_the_power_limit_that_the_hardware_file_states(tmp_path: Path) -> None:
    plain = mapped(tmp_path).cluster.device
    hosts = {"lab-h100": replace_facts(clock=0.8, power_w=400.0)}
    slow = map_row(measurement(tmp_path), {"Small-Llama": MODEL}, hosts)
    assert (slow.cluster.device.sustained, slow.cluster.device.power_w) == (0.8 * plain.sustained, 400.0)
    assert [note for note in slow.notes if "lab-h100" in note] == [
        f"clock as benchmarks of lab-h100 show it: 0.8 of other {plain.name}s",
        "power limit of lab-h100: 400 W",
    ]


def replace_facts(**change: float) -> HostFacts:
    return HOSTS["lab-h100"].model_copy(update=change)


def test_what_is_known_of_a_host_goes_behind_the_hardware_file(tmp_path: Path) -> None:
    path = tmp_path / "hardware.yaml"
    path.write_text("clusters:\n  lab: {gpu: B200-SXM}\n  simumax-b200: {gpu: B200-SXM, clock: 0.9}\n")
    found = read_hardware(path)
    assert (found["lab"].power_w, found["lab"].clock) == (None, 1.0)
    assert found["simumax-b200"].clock == 0.9
    assert set(found) == {"lab", "simumax-b200"}


def test_a_version_that_is_not_stated_is_taken_as_the_middle_one_and_said(tmp_path: Path) -> None:
    inputs = mapped(tmp_path, software="torchtitan at that commit")
    assert inputs.plan.stack == "torchtitan-0.1"
    assert inputs.notes == (
        "version of torchtitan FSDP2 not stated: taken as torchtitan-0.1, the middle one of its generations",
    )


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"torch_compile": "yes (loss only)"}, {"compile": True, "compile_model": False, "compile_loss": True}),
        ({"notes": "bf16 AdamW state (no fp32 master weights)"}, {"master_dtype": "bf16", "moment_dtype": "bf16"}),
        ({"notes": "fp32 master weights"}, {"master_dtype": "fp32", "moment_dtype": "fp32"}),
        ({"notes": "Chunked cross-entropy loss"}, {"loss_chunks": 8}),
        ({"param_dtype": "fp32"}, {"autocast": False}),
        ({"param_dtype": "fp32", "zero_stage": "0", "dp_replicate": "16", "dp_shard": "1"}, {"autocast": True}),
    ],
)
def test_what_recipes_say_of_compilers_and_dtypes(
    tmp_path: Path, change: dict[str, str], fields: dict[str, object]
) -> None:
    p = plan(tmp_path, **change)
    assert {name: getattr(p, name) for name in fields} == fields
