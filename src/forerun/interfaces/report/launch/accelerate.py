"""Hugging Face accelerate: the YAML file of `accelerate launch`, with FSDP2 or with DeepSpeed.

Source of the keys: huggingface/accelerate 1.15, commands/config/config_args.py, commands/launch.py,
parallelism_config.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

from forerun.interfaces.report.launch.deepspeed import CONFIG as DEEPSPEED_CONFIG
from forerun.interfaces.report.launch.deepspeed import deepspeed_config, json_text, shape_lines
from forerun.interfaces.report.launch.torchrun import bash, nodes_of, remark_nodes

if TYPE_CHECKING:
    from forerun.interfaces.report.launch.translation import Launch, Translation

CONFIG = "accelerate.yaml"


def accelerate_fsdp(t: Translation) -> Launch:
    """Returns the files of accelerate with FSDP2, or with DDP. Raises ForerunError for a plan that it would train
    differently."""
    _refuse(t)
    plan = t.plan
    sharded = plan.shards_optimizer
    config = _machine(t)
    config["distributed_type"] = "FSDP" if sharded else "MULTI_GPU" if plan.world_size > 1 else "NO"
    config["mixed_precision"] = t.word("precision")
    config |= _fp8(t) | (_fsdp(t) if sharded else _replicated(t)) | _mesh(t)
    if t.give("compile"):
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
        t.implied_if(plan.compile_model, "compile_model", "regions are layers")
        t.implied_if(not plan.compile_loss, "compile_loss", "regions are layers, and the loss is in none")
    _rest(t)
    environment = [*shape_lines(t), f"export MICRO_BATCH={t.give('micro_batch')}"]
    t.remark("your script reads MICRO_BATCH; Accelerator() takes ACCELERATE_GRADIENT_ACCUMULATION_STEPS by itself")
    environment.append(f"export ACCELERATE_GRADIENT_ACCUMULATION_STEPS={t.give('n_microbatches')}")
    return t.finish({CONFIG: yaml.safe_dump(config, sort_keys=False), "launch.sh": _script(t, environment)})


def accelerate_deepspeed(t: Translation) -> Launch:
    """Returns the files of accelerate with DeepSpeed. Raises ForerunError for a plan that it would train
    differently."""
    if t.plan.pp > 1:
        t.refuse("pp", "accelerate runs no DeepSpeed pipelines; use --launch deepspeed")
    settings = deepspeed_config(t)
    config = _machine(t) | {"distributed_type": "DEEPSPEED"}
    config["deepspeed_config"] = {
        "deepspeed_config_file": DEEPSPEED_CONFIG,
        "zero3_init_flag": settings["zero_optimization"]["stage"] == 3,
    }
    files = {CONFIG: yaml.safe_dump(config, sort_keys=False), DEEPSPEED_CONFIG: json_text(settings)}
    return t.finish(
        {**files, "launch.sh": _script(t, shape_lines(t), [f'--deepspeed_config_file "$HERE/{DEEPSPEED_CONFIG}"'])}
    )


def _refuse(t: Translation) -> None:
    plan = t.plan
    for name in ("pp", "ep"):
        if getattr(plan, name) > 1:
            t.refuse(name, "accelerate has no such axis; use --launch torchtitan or megatron-lm")
    if plan.fsdp > 1 and plan.zero_stage == 1:
        t.refuse("zero_stage", "FSDP2 shards gradients too; use 2, 3, or --launch accelerate-deepspeed")
    sharded = plan.shards_optimizer
    if plan.dp > 1 and plan.cp * plan.tp > 1 and (not sharded or plan.dp_shard == 1):
        t.refuse("dp_replicate", "accelerate replicates only without tp and cp; shard with dp_shard and zero_stage 3")
    if plan.cp > 1 and not sharded:
        t.refuse("zero_stage", "accelerate's context parallelism needs FSDP2 (zero_stage 3)")
    if plan.precision in ("mxfp8", "nvfp4"):
        t.refuse("precision", "accelerate has bf16, fp16, fp32 and fp8")
    if plan.master_dtype != "fp32":
        t.refuse("master_dtype", "accelerate keeps master weights in fp32 where it mixes precisions")
    if plan.precision == "fp8" and plan.fp8_recipe not in ("tensorwise", "none"):
        t.refuse("fp8_recipe", "accelerate's torchao backend scales tensorwise")
    wide = "fp32" if plan.precision in ("fp32", "tf32") else "fp16" if plan.precision == "fp16" else "bf16"
    own = wide if sharded else "fp32"
    if plan.reduce_dtype not in ("auto", own) and t.open("reduce_dtype"):
        t.refuse("reduce_dtype", f"accelerate reduces these gradients in {own}")
    if plan.accumulate_dtype not in ("auto", "fp32") and t.open("accumulate_dtype"):
        t.refuse("accumulate_dtype", "accelerate adds gradients up in fp32")


def _machine(t: Translation) -> dict[str, Any]:
    nodes, _ = nodes_of(t.plan.world_size, t.cluster.node_size)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": nodes,
        "num_processes": t.plan.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
    }


def _fp8(t: Translation) -> dict[str, Any]:
    if t.plan.precision != "fp8":
        t.implied("fp8_recipe", "fp8_all_gather")
        return {}
    if t.give("fp8_recipe") == "none":
        t.remark("fp8_recipe none: torchao scales tensorwise")
    return {"fp8_config": {"backend": "AO", "enable_fsdp_float8_all_gather": t.give("fp8_all_gather")}}


def _fsdp(t: Translation) -> dict[str, Any]:
    plan = t.plan
    stage = t.give("zero_stage")
    if stage == 2:
        t.remark(
            "zero_stage 2: FSDP2 keeps parameters gathered from forward to backward, and shards them between steps"
        )
    reshard = stage == 3 and t.give("reshard_after_forward") != "never"
    t.implied_if(plan.prefetch == 1, "prefetch", "FSDP2 gathers one unit ahead")
    t.implied_if(plan.ddp_bucket_mib == 0, "ddp_bucket_mib", "FSDP2 reduces unit by unit")
    fsdp: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshard,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": plan.offload == "params",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    t.remark(
        "FSDP wraps the layers in the model's _no_split_modules; give fsdp_transformer_layer_cls_to_wrap otherwise"
    )
    if plan.offload == "optimizer":
        t.note("offload", "FSDP2 offloads parameters with the optimizer state, or nothing; it stays on the GPU")
    else:
        t.give("offload")
    fsdp["fsdp_activation_checkpointing"] = _checkpointing(t)
    fsdp["fsdp_activation_checkpointing_offload"] = False
    return {"fsdp_config": fsdp}


def _checkpointing(t: Translation) -> bool:
    mode, every = t.give("activation_checkpointing"), t.plan.checkpoint_every
    if mode == "selective":
        t.note("selective_policy", "FSDP2's plugin checkpoints whole layers, which are recomputed here")
    t.implied_if(every == 1 or mode == "none", "checkpoint_every", "FSDP2's plugin checkpoints every layer")
    return bool(mode != "none")


def _replicated(t: Translation) -> dict[str, Any]:
    plan = t.plan
    t.implied("zero_stage", "reshard_after_forward", "prefetch")
    t.implied_if(
        plan.ddp_bucket_mib == 0,
        "ddp_bucket_mib",
        f"give Accelerator DistributedDataParallelKwargs(bucket_cap_mb={plan.ddp_bucket_mib:g})",
    )
    t.implied_if(plan.offload == "none", "offload", "DDP keeps everything on the GPU")
    if plan.activation_checkpointing == "none":
        t.implied("activation_checkpointing")
    else:
        t.note("activation_checkpointing", "call model.gradient_checkpointing_enable() in your script")
        selective = plan.activation_checkpointing == "selective"
        t.implied_if(not selective, "selective_policy", "gradient_checkpointing_enable recomputes whole layers")
        t.implied_if(plan.checkpoint_every == 1, "checkpoint_every", "your script checkpoints every layer")
    return {}


def _mesh(t: Translation) -> dict[str, Any]:
    plan = t.plan
    replicate, shard, tp, cp = (t.give(name) for name in ("dp_replicate", "dp_shard", "tp", "cp"))
    t.give("zero_stage")
    t.implied("pp", "ep")
    if tp > 1:
        t.implied_if(not plan.sequence_parallel, "sequence_parallel", "the model's own tensor-parallel plan decides")
        t.implied_if(not plan.loss_parallel, "loss_parallel", "the model's own tensor-parallel plan decides")
        t.implied_if(not plan.async_tp, "async_tp", "accelerate does not overlap tensor-parallel collectives")
    if cp > 1:
        if plan.cp_method == "ulysses":
            t.note("cp_method", "accelerate exchanges heads with DeepSpeed only; keys and values are gathered")
        else:
            t.give("cp_method")
    sharded = plan.shards_optimizer
    if not sharded and tp == 1:
        return {}
    axes: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": replicate,
        "parallelism_config_dp_shard_size": shard,
        "parallelism_config_tp_size": tp,
        "parallelism_config_cp_size": cp,
    }
    if cp > 1:
        axes["parallelism_config_cp_comm_strategy"] = "alltoall" if plan.cp_method == "ring" else "allgather"
    return {"parallelism_config": axes}


def _rest(t: Translation) -> None:
    plan = t.plan
    if plan.precision == "tf32":
        t.remark("precision tf32: call torch.set_float32_matmul_precision('high') before training")
    t.implied("master_dtype", "reduce_dtype", "accumulate_dtype")
    t.implied_if(plan.overlap_grad_reduce, "overlap_grad_reduce", "gradients are reduced while the backward pass runs")
    t.implied_if(not plan.cuda_graphs, "cuda_graphs", "accelerate launches each kernel")
    t.implied_if(plan.activation_offload == 0, "activation_offload", "activations stay on the GPU")
    t.implied_if(plan.attention == "auto", "attention", "load the model with attn_implementation")
    optimizer, switch = t.word("optimizer"), t.own.words["optimizer_impl"][plan.optimizer_impl]
    if optimizer.startswith("torch.optim."):
        t.note("optimizer", f"your script makes it: {optimizer}(..., {switch})")
        t.note("optimizer_impl", f"{switch} of {optimizer}")
    else:
        t.note("optimizer", f"your script makes it: {optimizer}(...)")
    t.stack()


def _script(t: Translation, environment: list[str], options: Sequence[str] = ()) -> str:
    nodes, _ = nodes_of(t.plan.world_size, t.cluster.node_size)
    remark_nodes(t, nodes)
    run = ["accelerate launch", f'--config_file "$HERE/{CONFIG}"']
    if nodes > 1:
        run += ['--machine_rank "${NODE_RANK:-0}"', '--main_process_ip "${MASTER_ADDR:?the first node}"']
        run += ['--main_process_port "${MASTER_PORT:-29500}"']
    return bash(t, environment, [*run, *options, '"${SCRIPT:?your training script}"'])
