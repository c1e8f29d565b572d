"""The settings of a plan that torchtitan 0.2 and 0.3 have in common, by section; each version's module adds its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.sources.symbolic.schedule import layers_of_stages

if TYPE_CHECKING:
    from forerun.interfaces.report.launch.torchtitan_model import Family
    from forerun.interfaces.report.launch.translation import Translation

Settings = dict[str, dict[str, Any]]


def common_settings(t: Translation, family: Family, head: str) -> Settings:
    """Returns sections training, parallelism and compile. `head` is the module name of the output layer."""
    _refuse_state(t)
    plan = t.plan
    settings: Settings = {"training": _training(t), "parallelism": _mesh(t) | _pipeline(t, head)}
    settings["compile"] = t.entries("compile")
    if plan.compile:
        parts = [part for part in ("model", "loss") if t.give(f"compile_{part}")]
        settings["compile"]["components"] = parts
    if family == "llama3" and plan.ep > 1:
        t.refuse("ep", "the model has no experts")
    _fixed_behaviour(t)
    return settings


def _refuse_state(t: Translation) -> None:
    plan = t.plan
    if plan.gathers_updates:
        t.refuse("zero_stage", "torchtitan shards parameters, gradients and optimizer state (3) or nothing (0)")
    if plan.zero_stage == 0 and plan.dp_shard > 1 and plan.cp * plan.tp * plan.pp > 1:
        t.refuse("zero_stage", "torchtitan replicates only where no other axis is above 1; use zero_stage 3")
    if plan.zero_stage == 0 and plan.cp > 1:
        t.refuse("zero_stage", "torchtitan shards parameters over context-parallel ranks; use zero_stage 3")
    if plan.precision == "fp16" or plan.master_dtype == "fp16":
        t.refuse("precision" if plan.precision == "fp16" else "master_dtype", "torchtitan has no fp16; use bf16")
    if plan.reduce_dtype not in ("auto", "fp32") and t.open("reduce_dtype"):
        t.refuse("reduce_dtype", "torchtitan reduces gradients in fp32")
    if plan.accumulate_dtype not in ("auto", plan.master_dtype) and t.open("accumulate_dtype"):
        t.refuse("accumulate_dtype", f"torchtitan adds gradients up in the parameters' dtype, {plan.master_dtype}")
    if plan.cp > 1 and plan.seq_len % (2 * plan.cp * plan.tp):
        t.refuse("seq_len", f"torchtitan needs a multiple of 2 x cp {plan.cp} x tp {plan.tp}")


def _training(t: Translation) -> dict[str, Any]:
    plan = t.plan
    micro, count = t.give("micro_batch"), t.give("n_microbatches")
    settings = {
        **t.entries("seq_len", "master_dtype"),
        "local_batch_size": micro * count if plan.pp > 1 else micro,
        "global_batch_size": plan.global_batch,
        "mixed_precision_param": "float32" if t.give("precision") in ("fp32", "tf32") else "bfloat16",
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": plan.offload == "params",
    }
    if plan.precision == "tf32":
        t.remark("precision tf32: call torch.set_float32_matmul_precision('high') before training")
    t.implied("reduce_dtype", "accumulate_dtype")
    if plan.offload == "optimizer":
        t.note("offload", "torchtitan offloads parameters with the optimizer state, or nothing; it stays on the GPU")
    else:
        t.give("offload")
    return settings


def _mesh(t: Translation) -> dict[str, Any]:
    plan = t.plan
    replicate, shard = t.give("dp_replicate"), t.give("dp_shard")
    if plan.zero_stage == 0:
        replicate, shard = replicate * shard, 1
    t.give("zero_stage")
    degrees = t.entries("dp_replicate", "dp_shard", "reshard_after_forward", "cp", "tp", "pp", "ep")
    return degrees | dict(zip(degrees, (replicate, shard), strict=False))


def _pipeline(t: Translation, head: str) -> dict[str, Any]:
    plan = t.plan
    if plan.pp == 1:
        return {}
    for name in ("virtual_stages", "layers_per_stage", "balance_ends"):
        t.give(name)
    return {
        **t.entries("pp_schedule"),
        "pipeline_parallel_microbatch_size": plan.micro_batch,
        "module_fqns_per_model_part": stage_modules(layers_of_stages(t.model.n_layers, plan), head),
    }


def stage_modules(layers: list[int], head: str) -> list[list[str]]:
    """Returns the modules of each stage in model order: embedding with the first, norm and head with the last."""
    parts, first = [], 0
    for count in layers:
        parts.append([f"layers.{number}" for number in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def _fixed_behaviour(t: Translation) -> None:
    plan = t.plan
    t.implied_if(plan.prefetch == 1, "prefetch", "FSDP2 gathers one unit ahead")
    replicated = plan.dp > 1 and not plan.shards_optimizer
    bucket_mib = t.own.constants["ddp_bucket_mib"]
    t.implied_if(plan.ddp_bucket_mib in (0, bucket_mib) or not replicated, "ddp_bucket_mib", f"is {bucket_mib} MiB")
    t.implied_if(plan.overlap_grad_reduce, "overlap_grad_reduce", "gradients are reduced while the backward pass runs")
    t.implied_if(plan.activation_offload == 0, "activation_offload", "torchtitan keeps activations on the GPU")
    t.stack()


def coarser_checkpointing(t: Translation) -> None:
    """Adds notes on selective policies that torchtitan lacks: whole layers are recomputed, which needs less memory."""
    plan = t.plan
    if plan.selective_policy == "params":
        t.note("selective_policy", "FSDP's reshard policy frees unsharded parameters; nothing else is recomputed")
    else:
        t.note("selective_policy", "torchtitan knows the policy op, or whole layers, which are recomputed here")
