"""Each setting of each tool alone: what a recipe that states it says of the plan and of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.plan.complete import REST
from forerun.describe.recipe.read import read_recipe
from forerun.describe.recipe.recipe import Recipe
from forerun.describe.recipe.shell import words_of_script


def _read(folder: Path, name: str, text: str) -> Recipe:
    path = folder / name
    path.write_text(text)
    return read_recipe(path)


def _some(recipe: Recipe, wanted: dict[str, Any]) -> dict[str, Any]:
    """The fields that `wanted` names, of the plan or of the recipe; a field that is not there is absent."""
    found = {**recipe.values, "gpus": recipe.gpus, "batch": recipe.global_batch, "unused": recipe.unused}
    return {name: found.get(name, "absent") for name in wanted}


# -- DeepSpeed and accelerate ------------------------------------------------------------------------------------------

PLAIN = {
    "stack": "deepspeed", "dp_shard": REST, "zero_stage": 0, "overlap_grad_reduce": True, "tp": 1, "cp": 1,
    "precision": "fp32", "offload": "none", "optimizer": "adamw", "micro_batch": 4, "n_microbatches": "absent",
    "cp_method": "absent", "master_dtype": "absent", "gpus": None, "batch": None, "unused": (),
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({}, PLAIN),
        ({"gradient_accumulation_steps": 8}, {"n_microbatches": 8}),
        ({"train_batch_size": 64}, {"batch": 64}),
        ({"zero_optimization": {"stage": 3, "overlap_comm": False}}, {"zero_stage": 3, "overlap_grad_reduce": False}),
        ({"tensor_parallel": {"autotp_size": 4}}, {"tp": 4}),
        ({"sequence_parallel_size": 2}, {"cp": 2, "cp_method": "ulysses"}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16", "master_dtype": "absent"}),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {"master_dtype": "bf16"}),
        ({"fp16": {"enabled": True}}, {"precision": "fp16"}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, {"offload": "params"}),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, {"offload": "optimizer"}),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, {"offload": "none"}),
        ({"optimizer": {"type": "Adam"}}, {"optimizer": "adamw"}),
        ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0}}}, {"optimizer": "adam"}),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0}}}, {"optimizer": "adamw"}),
        ({"optimizer": {"type": "SGD"}}, {"optimizer": "sgd"}),
        ({"optimizer": {"type": "Muon"}}, {"optimizer": "muon"}),
        ({"scheduler": {"type": "x"}, "steps_per_print": 5, "gradient_clipping": 1.0}, {"unused": ()}),
        ({"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}}, {"unused": ("flops_profiler.enabled",)}),
    ],
)
def test_a_setting_of_deepspeed(tmp_path: Path, config: dict[str, Any], fields: dict[str, Any]) -> None:
    recipe = _read(tmp_path, "ds.json", json.dumps({"train_micro_batch_size_per_gpu": 4, **config}))
    assert _some(recipe, fields) == fields
    assert (recipe.tool, recipe.model) == ("deepspeed", None)


@pytest.mark.parametrize("config", [{"train_batch_size": 8}, {"zero_optimization": {"stage": 1}}])
def test_one_setting_of_deepspeed_is_enough(tmp_path: Path, config: dict[str, Any]) -> None:
    assert _read(tmp_path, "ds.json", json.dumps(config)).values["stack"] == "deepspeed"


def test_an_unknown_optimizer_of_deepspeed_is_named(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": "Lion"}}
    with pytest.raises(ForerunError, match=r"optimizer\.type 'Lion' is not known; known: AdamW, Adam, SGD, Muon"):
        _read(tmp_path, "ds.json", json.dumps(config))


ACCELERATE = {
    "stack": "pytorch", "zero_stage": 3, "precision": "fp32", "dp_replicate": 1, "dp_shard": REST, "tp": 1, "cp": 1,
    "reshard_after_forward": "default", "offload": "none", "activation_checkpointing": "none", "compile": False,
    "gpus": 1, "batch": None, "unused": (),
}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        ("distributed_type: FSDP", ACCELERATE),
        ("distributed_type: MULTI_GPU", {"zero_stage": 0, "reshard_after_forward": "absent", "offload": "absent"}),
        ("distributed_type: 'NO'\nnum_processes: 16", {"zero_stage": 0, "gpus": 16}),
        ("distributed_type: FSDP\nmixed_precision: fp8", {"precision": "fp8"}),
        ("distributed_type: FSDP\nmixed_precision: bf16", {"precision": "bf16"}),
        (
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: 4,"
            " parallelism_config_cp_size: 2, parallelism_config_dp_replicate_size: 2,"
            " parallelism_config_dp_shard_size: -1}",
            {"tp": 4, "cp": 2, "dp_replicate": 2, "dp_shard": -1},
        ),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: false}",
         {"reshard_after_forward": "never"}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: FULL_SHARD}",
         {"reshard_after_forward": "default"}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}",
         {"reshard_after_forward": "never"}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}", {"offload": "params"}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: true}",
         {"activation_checkpointing": "full"}),
        ("distributed_type: FSDP\ndynamo_config: {dynamo_backend: inductor, dynamo_use_regional_compilation: true}",
         {"compile": True, "unused": ()}),
        ("distributed_type: FSDP\ndynamo_config: {dynamo_backend: 'no', dynamo_mode: x}",
         {"compile": False, "unused": ("dynamo_config.dynamo_mode",)}),
        ("distributed_type: FSDP\nmachine_rank: 0\ndebug: false\nfsdp_config: {fsdp_version: 2}", {"unused": ()}),
    ],
)  # fmt: skip
def test_a_setting_of_accelerate(tmp_path: Path, lines: str, fields: dict[str, Any]) -> None:
    recipe = _read(tmp_path, "a.yaml", f"{lines}\n")
    assert _some(recipe, fields) == fields
    assert recipe.tool == "accelerate"


# -- Megatron-LM -------------------------------------------------------------------------------------------------------

MEGATRON = {
    "stack": "megatron-core", "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "micro_batch": 1, "seq_len": 4096,
    "sequence_parallel": False, "async_tp": False, "expert_overlap": False, "cp_method": "absent", "dp_shard": REST,
    "zero_stage": 0, "dp_replicate": 1, "overlap_grad_reduce": False, "ddp_bucket_mib": "absent", "precision": "fp32",
    "reduce_dtype": "absent", "accumulate_dtype": "absent", "fp8_all_gather": False, "virtual_stages": "absent",
    "activation_checkpointing": "none", "optimizer": "adamw", "cuda_graphs": False, "offload": "none",
    "attention": "absent", "n_microbatches": 1, "batch": None, "gpus": None, "dispatcher": "absent", "unused": (),
}  # fmt: skip
EXPERTS = "--num-experts 8 "
STAGES = "--pipeline-model-parallel-size 4 "


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ("", MEGATRON),
        ("--global-batch-size 64", {"batch": 64, "n_microbatches": "absent"}),
        ("--nnodes 4 --nproc-per-node 8", {"gpus": 32}),
        ("--nnodes 4", {"gpus": None}),
        ("--sequence-parallel", {"sequence_parallel": False}),
        ("--sequence-parallel --tensor-model-parallel-size 2", {"sequence_parallel": True, "tp": 2, "etp": 1}),
        ("--tensor-model-parallel-size 2 --tp-comm-overlap", {"async_tp": True}),
        ("--context-parallel-size 2", {"cp_method": "ring"}),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"cp_method": "ulysses"}),
        ("--cp-comm-type a2a", {"cp_method": "absent", "unused": ("cp-comm-type",)}),
        (f"{EXPERTS}--tensor-model-parallel-size 2", {"etp": 2, "dispatcher": "allgather"}),
        (f"{EXPERTS}--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", {"etp": 1}),
        (f"{EXPERTS}--moe-token-dispatcher-type alltoall", {"dispatcher": "alltoall"}),
        (f"{EXPERTS}--moe-token-dispatcher-type flex", {"dispatcher": "deepep"}),
        (f"{EXPERTS}--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
         {"dispatcher": "hybridep"}),
        (f"{EXPERTS}--overlap-moe-expert-parallel-comm", {"expert_overlap": True, "shared_expert_overlap": False}),
        (f"{EXPERTS}--moe-shared-expert-overlap", {"expert_overlap": False, "shared_expert_overlap": True}),
        ("--use-distributed-optimizer --overlap-param-gather", {"zero_stage": 1, "unused": ()}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", {"zero_stage": 3}),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads", {"zero_stage": 2}),
        ("--use-megatron-fsdp", {"zero_stage": 0}),
        ("--data-parallel-sharding-strategy optim_grads_params", {"zero_stage": 0}),
        ("--use-torch-fsdp2", {"zero_stage": 3}),
        ("--optimizer dist_muon", {"zero_stage": 1, "optimizer": "muon"}),
        ("--optimizer muon", {"zero_stage": 0, "optimizer": "muon"}),
        ("--num-distributed-optimizer-instances 2 --overlap-grad-reduce",
         {"dp_replicate": 2, "overlap_grad_reduce": True}),
        ("--ddp-bucket-size 1048576", {"ddp_bucket_mib": 4.0}),
        ("--ddp-bucket-size 1048576 --grad-reduce-in-bf16", {"ddp_bucket_mib": 2.0}),
        ("--bf16", {"precision": "bf16", "reduce_dtype": "absent"}),
        ("--bf16 --grad-reduce-in-bf16", {"reduce_dtype": "bf16", "accumulate_dtype": "bf16"}),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", {"reduce_dtype": "fp32", "accumulate_dtype": "fp32"}),
        ("--fp16", {"precision": "fp16", "reduce_dtype": "fp16", "accumulate_dtype": "fp16"}),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", {"precision": "fp16", "reduce_dtype": "fp32"}),
        ("--bf16 --fp8-format hybrid", {"precision": "fp8", "fp8_recipe": "delayed"}),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", {"precision": "fp8", "fp8_recipe": "tensorwise"}),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", {"precision": "fp8", "fp8_recipe": "block"}),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", {"precision": "mxfp8", "fp8_recipe": "absent"}),
        ("--bf16 --fp8-recipe tensorwise", {"precision": "bf16", "fp8_recipe": "absent"}),
        ("--bf16 --fp4-format e2m1", {"precision": "nvfp4"}),
        ("--bf16 --fp8-format hybrid --fp8-param-gather", {"fp8_all_gather": True}),
        (STAGES, {"pp": 4, "virtual_stages": 1, "pp_schedule": "1F1B", "balance_ends": False}),
        (f"{STAGES}--num-virtual-stages-per-pipeline-rank 2", {"virtual_stages": 2, "pp_schedule": "Interleaved1F1B"}),
        (f"{STAGES}--num-layers-per-virtual-pipeline-stage 2", {"virtual_stages": 4}),
        (f"{STAGES}--num-layers-per-virtual-pipeline-stage 64", {"virtual_stages": 1}),
        (f"{STAGES}--account-for-embedding-in-pipeline-split", {"balance_ends": False}),
        (f"{STAGES}--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         {"balance_ends": True}),
        (f"{STAGES}--pipeline-model-parallel-layout Et*7|t*9|(t|)*4,t*12|mL",
         {"layers_per_stage": (7, 9, 1, 1, 1, 1, 12, 0), "virtual_stages": 2, "pp_schedule": "Interleaved1F1B"}),
        (f"{STAGES}--use-tp-pp-dp-mapping", {"mesh_order": "tp-cp-pp-dp_shard-dp_replicate"}),
        ("--use-tp-pp-dp-mapping", {"mesh_order": "absent", "unused": ()}),
        ("--recompute-granularity selective", {"activation_checkpointing": "selective", "checkpoint_every": "absent"}),
        ("--recompute-granularity selective --recompute-modules mlp moe_act",
         {"recompute_modules": ("mlp", "moe_act"), "selective_policy": "absent"}),
        ("--recompute-activations --recompute-modules layernorm", {"recompute_modules": ("layernorm",)}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8",
         {"activation_checkpointing": "full", "checkpoint_every": 4}),
        ("--recompute-granularity full --recompute-num-layers 8", {"checkpoint_every": 1}),
        ("--attention-backend unfused", {"attention": "naive"}),
        ("--attention-backend fused", {"attention": "cudnn"}),
        ("--attention-backend flash", {"attention": "flash3"}),
        ("--attention-backend auto", {"attention": "absent"}),
        ("--attention-backend local", {"attention": "absent"}),
        ("--cuda-graph-impl local", {"cuda_graphs": True}),
        ("--cuda-graph-impl none", {"cuda_graphs": False}),
        ("--cpu-offloading-num-layers 16", {"activation_offload": 0.5}),
        ("--weight-decay 0.1", {"optimizer": "adamw"}),
        ("--optimizer sgd --weight-decay 0.0", {"optimizer": "sgd"}),
        ("--lr 1e-4 --save-interval 5 --seed 1 --unheard 5 --also-unheard", {"unused": ("unheard", "also-unheard")}),
    ],
)  # fmt: skip
def test_an_argument_of_megatron(tmp_path: Path, arguments: str, fields: dict[str, Any]) -> None:
    sizes = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 4096\n"
    recipe = _read(tmp_path, "args.txt", sizes + arguments + "\n")
    assert _some(recipe, fields) == fields


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--context-parallel-size 2 --cp-comm-type x", "cp-comm-type 'x' is not known; known: p2p, all_gather, a2a"),
        (f"{STAGES}--pipeline-model-parallel-layout Et|tx", "has the stage 'tx', where only E, t, m and L stand"),
        ("--attention-backend mine", "attention-backend 'mine' is not known"),
        ("--optimizer lion", "optimizer 'lion' is not known; known: adam, sgd, muon, dist_muon"),
        ("--window-size wide", "window-size must be two numbers joined by a comma, such as 128,0"),
        (f"{EXPERTS}--moe-layer-freq 2", r"moe-layer-freq must be 1, or dense layers before others as \[0\]\*3"),
    ],
)
def test_a_wrong_argument_of_megatron_is_named(tmp_path: Path, arguments: str, says: str) -> None:
    sizes = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 4096\n"
    with pytest.raises(ForerunError, match=says):
        _read(tmp_path, "args.txt", sizes + arguments + "\n")


MODEL = {
    "ffn_hidden": 16384, "head_dim": 128, "n_kv_heads": 32, "vocab": 32000, "mlp": "gelu", "norm": "layernorm",
    "norm_bias": True, "position": "learned", "max_positions": 0, "tied_embeddings": True, "qkv_bias": True,
    "out_bias": True, "mlp_bias": True, "qk_norm": False, "rope_theta": None, "sliding_window": None, "moe": None,
    "mla": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ("", MODEL),
        ("--swiglu", {"mlp": "swiglu", "ffn_hidden": 10880}),  # 8/3 of 4096 is 10922; 170 times 64
        ("--squared-relu", {"mlp": "relu2", "ffn_hidden": 16384}),
        ("--ffn-hidden-size 512 --kv-channels 64", {"ffn_hidden": 512, "head_dim": 64}),
        ("--group-query-attention", {"n_kv_heads": 1}),
        ("--num-query-groups 8", {"n_kv_heads": 8}),
        ("--normalization RMSNorm", {"norm": "rmsnorm", "norm_bias": False}),
        ("--position-embedding-type none", {"position": "none"}),
        ("--use-rotary-position-embeddings --rotary-base 10000", {"position": "rope", "rope_theta": 10000.0}),
        ("--max-position-embeddings 2048", {"max_positions": 2048}),
        ("--position-embedding-type rope --max-position-embeddings 2048", {"max_positions": 0}),
        ("--untie-embeddings-and-output-weights", {"tied_embeddings": False}),
        ("--disable-bias-linear", {"qkv_bias": False, "out_bias": False, "mlp_bias": False}),
        ("--disable-bias-linear --add-qkv-bias", {"qkv_bias": True, "out_bias": False}),
        ("--qk-layernorm", {"qk_norm": True}),
        ("--window-size 128,0", {"sliding_window": 128}),
        ("--mtp-num-layers 2 --mtp-loss-scaling-factor 0.1", {"mtp_modules": 2}),
        ("--window-size (4096,0)", {"sliding_window": 4096}),
    ],
)
def test_an_argument_of_megatron_sets_the_model(tmp_path: Path, arguments: str, fields: dict[str, Any]) -> None:
    sizes = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 4096\n"
    if "(" in arguments:
        arguments = arguments.replace("(", '"(').replace(")", ')"')
    model = _read(tmp_path, "args.txt", sizes + arguments + "\n").named_model()
    assert {name: getattr(model, name) for name in fields} == fields
    assert (model.name, model.n_layers, model.hidden, model.n_heads) == ("32 layers of 4096", 32, 4096, 32)


def test_experts_and_latent_attention_of_megatron(tmp_path: Path) -> None:
    sizes = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 4096\n"
    plain = _read(tmp_path, "args.txt", f"{sizes}--num-experts 8 --ffn-hidden-size 1024\n").named_model().moe
    assert plain is not None
    assert (plain.n_experts, plain.top_k, plain.expert_ffn, plain.shared_ffn, plain.n_dense_layers) == (
        8,
        2,
        1024,
        0,
        0,
    )
    assert (plain.n_groups, plain.top_groups, plain.capacity_factor) == (1, 1, None)
    assert (plain.shared_gate, plain.router_bias) == (False, False)
    own = "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816"
    own += " --moe-layer-freq ([0]*3+[1]*29) --moe-router-num-groups 8 --moe-router-group-topk 4"
    own += " --moe-router-enable-expert-bias --moe-shared-expert-gate --moe-expert-capacity-factor 1.5"
    text = sizes + own.replace("(", '"(').replace(")", ')"')
    found = _read(tmp_path, "args.txt", f"{text}\n").named_model().moe
    assert found is not None
    assert (found.n_experts, found.top_k, found.expert_ffn, found.shared_ffn, found.n_dense_layers) == (
        64, 6, 1408, 2816, 3,
    )  # fmt: skip
    assert (found.n_groups, found.top_groups, found.capacity_factor) == (8, 4, 1.5)
    assert (found.shared_gate, found.router_bias) == (True, True)
    mla = _read(tmp_path, "args.txt", f"{sizes}--multi-latent-attention --num-query-groups 4\n").named_model()
    assert mla.mla is not None
    assert (mla.mla.q_lora_rank, mla.mla.kv_lora_rank, mla.mla.qk_nope_dim, mla.mla.qk_rope_dim) == (None, 32, 128, 64)
    assert (mla.mla.v_head_dim, mla.head_dim, mla.n_kv_heads) == (128, 128, 32)
    ranked = _read(tmp_path, "args.txt", f"{sizes}--multi-latent-attention --q-lora-rank 1536 --v-head-dim 64\n")
    assert (ranked.named_model().mla.q_lora_rank, ranked.named_model().head_dim) == (1536, 64)  # type: ignore[union-attr]


@pytest.mark.parametrize("left_out", ["--num-layers 32 ", "--hidden-size 4096 ", "--vocab-size 32000 "])
def test_a_size_that_is_not_stated_is_named(tmp_path: Path, left_out: str) -> None:
    sizes = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 4096\n"
    recipe = _read(tmp_path, "args.txt", sizes.replace(left_out, ""))
    assert recipe.model is None
    assert recipe.no_model == f"the recipe does not say {left_out.split()[0]}"


def test_fields_of_nemo_are_arguments(tmp_path: Path) -> None:
    text = """
other: {hidden_size: 1, seq_length: 2048, micro_batch_size: 2}
model: {hidden_size: 512, num_layers: 4, num_attention_heads: 8, vocab_size: 1000, add_bias_linear: true,
  share_embeddings_and_output_weights: false, gated_linear_unit: false, fp8: hybrid, tensor_model_parallel_size: 2,
  sequence_parallel: false, virtual_pipeline_model_parallel_size: null}
trainer: {devices: 4, num_nodes: 2}
mixed_precision: fp16_mixed
"""
    recipe = _read(tmp_path, "nemo.yaml", text)
    model = recipe.named_model()
    assert (model.hidden, model.qkv_bias, model.tied_embeddings, model.mlp) == (512, True, False, "gelu")
    wanted = {"gpus": 8, "precision": "fp8", "tp": 2, "sequence_parallel": False, "micro_batch": 2, "seq_len": 2048}
    assert _some(recipe, wanted) == wanted


# -- torchtitan --------------------------------------------------------------------------------------------------------

TITAN = {
    "stack": "torchtitan", "seq_len": 2048, "micro_batch": 8, "n_microbatches": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1,
    "dp_replicate": 1, "dp_shard": REST, "zero_stage": 3, "reshard_after_forward": "default", "async_tp": "absent",
    "loss_parallel": "absent", "cp_method": "absent", "etp": "absent", "dispatcher": "absent", "precision": "bf16",
    "master_dtype": "fp32", "activation_checkpointing": "full", "checkpoint_every": 2, "compile": False,
    "compile_loss": "absent", "optimizer": "adamw", "optimizer_impl": "fused", "offload": "none", "batch": None,
    "attention": "absent", "gpus": None, "unused": (),
}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        ("[training]\nseq_len = 2048", TITAN),
        ("[training]\nglobal_batch_size = 64", {"batch": 64, "n_microbatches": "absent"}),
        ("[training]\nglobal_batch_size = -1", {"batch": None, "n_microbatches": 1}),
        ("[parallelism]\ntensor_parallel_degree = 2", {"tp": 2, "loss_parallel": True, "async_tp": False}),
        ("[parallelism]\ntensor_parallel_degree = 2\ndisable_loss_parallel = true", {"loss_parallel": False}),
        ("[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true", {"async_tp": True}),
        ("[parallelism]\ndisable_loss_parallel = true", {"loss_parallel": "absent", "unused": ()}),
        ("[parallelism]\ncontext_parallel_degree = 2", {"cp_method": "allgather"}),
        ("[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = 'alltoall'",
         {"cp_method": "ring"}),
        ("[parallelism]\ndata_parallel_shard_degree = 1", {"zero_stage": 0, "dp_shard": 1}),
        ("[parallelism]\nexpert_parallel_degree = 2", {"ep": 2, "etp": 1, "dispatcher": "absent"}),
        ("[parallelism]\nfsdp_reshard_after_forward = 'never'", {"reshard_after_forward": "never"}),
        ("[parallelism]\npipeline_parallel_degree = 2",
         {"micro_batch": 1, "n_microbatches": 8, "virtual_stages": 1, "balance_ends": True}),
        ("[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part ="
         " [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2'], ['layers.3'], ['norm', 'output']]",
         {"layers_per_stage": (1, 2, 1, 0), "virtual_stages": 2, "balance_ends": False}),
        ("[training]\nmixed_precision_param = 'float32'", {"precision": "fp32"}),
        ("[training]\nmixed_precision_param = 'float32'\ndtype = 'bfloat16'", {"precision": "fp32"}),
        ("[training]\nmixed_precision_param = 'float32'\ndtype = 'bfloat16'\n[parallelism]\n"
         "data_parallel_shard_degree = 1", {"precision": "bf16", "master_dtype": "bf16"}),
        ("[training]\nmixed_precision_param = 'float32'\n[parallelism]\ndata_parallel_shard_degree = 1",
         {"precision": "fp32"}),
        ("[model]\nconverters = ['float8']", {"precision": "fp8", "fp8_recipe": "tensorwise", "fp8_all_gather": False}),
        ("[model]\nconverters = ['quantize.linear.float8']\n[quantize.linear.float8]\n"
         "recipe_name = 'rowwise_with_gw_hp'\nenable_fsdp_float8_all_gather = true",
         {"precision": "fp8", "fp8_recipe": "rowwise", "fp8_all_gather": True}),
        ("[model]\nconverters = ['mx']", {"precision": "mxfp8", "fp8_recipe": "absent"}),
        ("[training]\nseed = 1\n[quantize.linear.float8]\nrecipe_name = 'rowwise'",
         {"precision": "bf16", "unused": ()}),
        ("[training]\nseed = 1\n[activation_checkpoint]\nmode = 'none'",
         {"activation_checkpointing": "none", "checkpoint_every": "absent"}),
        ("[training]\nseed = 1\n[activation_checkpoint]\nselective_ac_option = 3", {"checkpoint_every": 3}),
        ("[training]\nseed = 1\n[activation_checkpoint]\nselective_ac_option = 'op'",
         {"activation_checkpointing": "selective", "selective_policy": "op"}),
        ("[training]\nseed = 1\n[compile]\nenable = true",
         {"compile": True, "compile_loss": True, "compile_model": True}),
        ("[training]\nseed = 1\n[compile]\nenable = true\ncomponents = ['model']",
         {"compile_loss": False, "compile_model": True}),
        ("[training]\nseed = 1\n[compile]\nenable = false\ncomponents = ['model']",
         {"compile": False, "compile_model": "absent"}),
        ("[training]\nseed = 1\n[optimizer]\nimplementation = 'for-loop'", {"optimizer_impl": "loop"}),
        ("[training]\nenable_cpu_offload = true", {"offload": "params"}),
        ("[training]\nsteps = 5\nunheard = 1\n[metrics]\nlog_freq = 1\n[profiling]\nx = 1",
         {"unused": ("training.unheard",)}),
        ("[training]\nbatch_size = 4", {"stack": "torchtitan-0.1", "micro_batch": 4}),
        ("[training]\nbatch_size = 4\nlocal_batch_size = 2", {"stack": "torchtitan-0.1", "micro_batch": 2}),
    ],
)  # fmt: skip
def test_a_setting_of_torchtitan(tmp_path: Path, lines: str, fields: dict[str, Any]) -> None:
    recipe = _read(tmp_path, "a.toml", f"{lines}\n")
    assert _some(recipe, fields) == fields


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("[training]\nlocal_batch_size = 3\n[parallelism]\npipeline_parallel_degree = 2\n"
         "pipeline_parallel_microbatch_size = 2", "local_batch_size 3 is not a multiple of the micro batch 2"),
        ("[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [['a'], ['b'], ['c']]",
         "has 3 parts for 2 ranks"),
        ("[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = 'x'",
         "'x' is not known; known: alltoall, allgather"),
        ("[parallelism]\ndata_parallel_shard_degree = -2", "must be at least -1"),
    ],
)  # fmt: skip
def test_a_wrong_setting_of_torchtitan_is_named(tmp_path: Path, lines: str, says: str) -> None:
    with pytest.raises(ForerunError, match=says):
        _read(tmp_path, "a.toml", f"{lines}\n")


# -- every recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "options", "batch", "gpus", "expected"),
    [
        ({"n_microbatches": 4}, {}, None, None, ({"n_microbatches": 4}, None, None)),
        ({"n_microbatches": 4}, {}, 64, None, ({}, 64, None)),
        ({"n_microbatches": 4}, {"n_microbatches": 2}, 64, None, ({"n_microbatches": 2}, 64, None)),
        ({"tp": 4}, {"tp": 2}, None, 8, ({"tp": 2}, None, 8)),
        ({"dp_shard": REST}, {}, None, 8, ({"dp_shard": REST}, None, 8)),
        ({"dp_shard": REST}, {"dp_shard": 4}, None, None, ({"dp_shard": 4}, None, None)),
    ],
)
def test_what_a_user_gives_goes_before_the_recipe(
    own: dict[str, Any], options: dict[str, Any], batch: int | None, gpus: int | None, expected: tuple[Any, ...]
) -> None:
    assert Recipe("a", "tool", own, None).under(options, batch, gpus) == expected


def test_a_recipes_own_batch_and_gpus_stand_unless_others_are_given() -> None:
    recipe = Recipe("a", "tool", {"dp_replicate": REST}, None, global_batch=32, gpus=16)
    assert recipe.under({}, None, None)[1:] == (32, 16)
    assert recipe.under({}, 64, 8)[1:] == (64, 8)
    assert recipe.under({"n_microbatches": 2}, None, None)[1:] == (None, 16)
    for name in ("dp_shard", "dp_replicate"):
        with pytest.raises(ForerunError, match="a: data parallelism takes the GPUs that are left; say how many"):
            Recipe("a", "tool", {name: REST}, None).under({}, None, None)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("python a.py --x 1; python b.py --y 2", ["python", "b.py", "--y", "2"]),
        ("python a.py --x 1\npython b.py", ["python", "a.py", "--x", "1"]),
        ("A='--x 1'\nB=\"--y 2\"\nC=3\nrun --z", ["run", "--z", "--x", "1", "--y", "2"]),
        ("A=--x\nA+=' 1'\npython a.py $A", ["python", "a.py", "--x", "1"]),
        ("A+=(--x 1)\npython a.py ${A[*]}", ["python", "a.py", "--x", "1"]),
        ("export A=5\ndeclare -r B=6\npython a.py --x=$A --y ${B}", ["python", "a.py", "--x=5", "--y", "6"]),
        ("python a.py --x 'a # b' # a comment\n# python b.py --z", ["python", "a.py", "--x", "a # b"]),
        ("python a.py --x a#b", ["python", "a.py", "--x", "a#b"]),
        ("A=(--x 'two words' --y)\npython a.py ${A[@]}", ["python", "a.py", "--x", "two words", "--y"]),
        ("for i in 1 2; do\npython a.py --x 1\ndone", ["python", "a.py", "--x", "1"]),
        ("if [ 1 == 2 ]; then\npython a.py --x\nfi\npython a.py --y", ["python", "a.py", "--y"]),
        ("if [ 1 == 1 ]\nthen\npython a.py --x\nelse\npython a.py --y\nfi", ["python", "a.py", "--x"]),
        ("N=12\npython a.py --x $((N-2)) $(( $N / 5 ))", ["python", "a.py", "--x", "10", "2"]),
        ("python a.py \"--x 1\" '--y 2'", ["python", "a.py", "--x", "1", "--y", "2"]),
    ],
)
def test_the_words_of_a_script(script: str, words: list[str]) -> None:
    assert words_of_script(script + "\n", "x") == words


@pytest.mark.parametrize(
    ("script", "line"), [("a\nb\nc 'd\n", 3), ("a\n\nb (c\n", 3), ("a \\\nb 'c\n", 1), ("'\n'\nx \"y", 3)]
)
def test_a_quotation_mark_that_is_never_closed_has_its_line(script: str, line: int) -> None:
    with pytest.raises(ForerunError, match=f"^x, line {line}: "):
        words_of_script(script, "x")
