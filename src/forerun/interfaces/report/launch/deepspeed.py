"""DeepSpeed: ds_config.json for a training script of the user's.

Source of the keys: deepspeedai/DeepSpeed v0.19, deepspeed/runtime/config.py, runtime/zero/config.py,
runtime/precision_config.py, runtime/tensor_parallel/config.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from forerun.common.units import MIB
from forerun.describe.plan.plan import FP8_PRECISIONS
from forerun.interfaces.report.launch.torchrun import script

if TYPE_CHECKING:
    from forerun.describe.model.spec import ModelSpec
    from forerun.interfaces.report.launch.translation import Launch, Translation

CONFIG = "ds_config.json"


def deepspeed(t: Translation) -> Launch:
    """Returns the files of DeepSpeed. Raises ForerunError for a plan that it would train differently."""
    config = deepspeed_config(t)
    words = ['"${SCRIPT:?your training script}"', "--deepspeed", f'--deepspeed_config "$HERE/{CONFIG}"']
    return t.finish({CONFIG: json_text(config), "launch.sh": script(t, words, shape_lines(t))})


def json_text(config: dict[str, Any]) -> str:
    """Returns `config` as JSON, two spaces deep."""
    return json.dumps(config, indent=2) + "\n"


def shape_lines(t: Translation) -> list[str]:
    """Returns the environment of the user's script, which says what the script must build, and adds a remark on it."""
    t.remark(f"your script builds the model ({model_words(t.model)}) and reads SEQ_LEN")
    return [f"export SEQ_LEN={t.give('seq_len')}"]


def model_words(model: ModelSpec) -> str:
    """Returns name and dimensions in one line."""
    experts = (
        f", {model.moe.n_experts} experts of {model.moe.expert_ffn}, {model.moe.top_k} a token" if model.moe else ""
    )
    heads = f"{model.n_heads} heads of {model.head_dim}, {model.n_kv_heads} of keys and values"
    widths = f"hidden {model.hidden}, feed-forward {model.ffn_hidden}, vocabulary {model.vocab}"
    kinds = f" of {len(model.kinds)} kinds" if len(model.kinds) > 1 else ""
    return f"{model.name}: {model.n_layers} layers{kinds}, {widths}, {heads}{experts}"


def deepspeed_config(t: Translation) -> dict[str, Any]:
    """Returns the contents of ds_config.json."""
    plan = t.plan
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": t.give("micro_batch"),
        "gradient_accumulation_steps": t.give("n_microbatches"),
        "gradient_clipping": 1.0,
    }
    config["zero_optimization"] = _zero(t)
    config |= _precision(t) | _axes(t) | _optimizer(t) | _checkpointing(t)
    t.implied_if(not plan.compile, "compile", "call engine.compile() after deepspeed.initialize")
    t.implied_if(plan.compile_model, "compile_model", "engine.compile() compiles the model")
    t.implied_if(plan.compile_loss, "compile_loss", "compile the loss in your script, or not")
    t.implied_if(not plan.cuda_graphs, "cuda_graphs", "DeepSpeed launches each kernel")
    t.implied_if(plan.attention == "auto", "attention", "your model chooses its attention kernel")
    t.implied_if(plan.activation_offload == 0, "activation_offload", "activations stay on the GPU")
    t.stack()
    return config


def _zero(t: Translation) -> dict[str, Any]:
    plan = t.plan
    replicas, shards, stage = t.give("dp_replicate"), t.give("dp_shard"), t.give("zero_stage")
    if plan.fsdp == 1:
        stage = 0
    if stage and replicas > 1:
        t.note("dp_replicate", f"DeepSpeed shards over all {replicas * shards} data-parallel ranks, without replicas")
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": t.give("overlap_grad_reduce")}
    if t.give("ddp_bucket_mib"):
        width = 4 if plan.reduce_dtype == "fp32" else 2
        zero["reduce_bucket_size"] = max(1, round(plan.ddp_bucket_mib * MIB / width))
    if stage == 3:
        t.implied_if(plan.reshard_after_forward != "never", "reshard_after_forward", "see stage3_max_reuse_distance")
        t.implied_if(plan.prefetch == 1, "prefetch", "DeepSpeed gathers by bytes ahead (stage3_prefetch_bucket_size)")
        if plan.prefetch == 0:
            zero["stage3_prefetch_bucket_size"] = 0
    t.implied("reshard_after_forward", "prefetch")
    _offload(t, zero, stage)
    return zero


def _offload(t: Translation, zero: dict[str, Any], stage: int) -> None:
    place = {"device": "cpu", "pin_memory": True}
    if t.plan.offload == "none" or stage:
        t.give("offload")
    else:
        t.note("offload", "DeepSpeed offloads sharded state only (zero_stage 1 to 3)")
        return
    if t.plan.offload != "none":
        zero["offload_optimizer"] = place
        t.remark("offload: DeepSpeed updates what lives in host memory on the host (DeepSpeedCPUAdam)")
    if t.plan.offload == "params":
        zero["offload_param"] = dict(place)


def _precision(t: Translation) -> dict[str, Any]:
    plan = t.plan
    precision, master = t.give("precision"), t.give("master_dtype")
    if precision in FP8_PRECISIONS:
        t.refuse("precision", "DeepSpeed has no such matrix products; use bf16, or your model's Transformer Engine")
    if master not in ("fp32", "bf16") or (master == "bf16" and precision != "bf16"):
        t.refuse("master_dtype", "DeepSpeed keeps master weights in fp32, or with bf16 products in bf16")
    if master == "bf16" and not plan.shards_optimizer:
        t.refuse("master_dtype", "DeepSpeed keeps them in bf16 only with zero_stage 1 to 3 and dp_shard above 1")
    t.implied("fp8_recipe", "fp8_all_gather")
    config: dict[str, Any] = {}
    if precision in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    if master == "bf16":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if precision == "tf32":
        t.remark("precision tf32: call torch.set_float32_matmul_precision('high') before training")
    if t.give("reduce_dtype") != "auto":
        config["communication_data_type"] = plan.reduce_dtype
    if t.give("accumulate_dtype") != "auto":
        config["data_types"] = {"grad_accum_dtype": plan.accumulate_dtype}
    return config


def _axes(t: Translation) -> dict[str, Any]:
    plan, config = t.plan, dict[str, Any]()
    if t.give("tp") > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp, "tp_overlap_comm": t.give("async_tp")}
        t.implied_if(not plan.sequence_parallel, "sequence_parallel", "AutoTP keeps whole sequences on every rank")
        t.implied_if(not plan.loss_parallel, "loss_parallel", "set vocab_parallel_lm_head for it")
        if plan.shards_parameters:
            t.refuse("zero_stage", "AutoTP goes with zero_stage 0 to 2")
    if t.give("cp") > 1:
        config["sequence_parallel_size"] = plan.cp
        if plan.cp_method == "ulysses":
            t.give("cp_method")
        elif t.model.n_heads % plan.cp:
            t.refuse("cp_method", f"DeepSpeed has ulysses, and {t.model.n_heads} heads don't split over cp {plan.cp}")
        else:
            t.note("cp_method", "DeepSpeed has ulysses, which exchanges heads")
    if t.give("ep") > 1:
        t.remark(f"ep {plan.ep}: build the experts as deepspeed.moe.layer.MoE(..., ep_size={plan.ep})")
    if t.give("pp") > 1:
        _pipeline(t)
    return config


def _pipeline(t: Translation) -> None:
    plan = t.plan
    if plan.shards_gradients:
        t.refuse("zero_stage", "DeepSpeed's pipelines go with zero_stage 0 or 1")
    if plan.pp_schedule != "1F1B":
        t.refuse("pp_schedule", "DeepSpeed's pipelines run 1F1B")
    t.implied("pp_schedule", "virtual_stages")
    t.remark(
        f"pp {plan.pp}: your script wraps the layers in deepspeed.pipe.PipelineModule(layers, num_stages={plan.pp})"
    )
    for name in ("layers_per_stage", "balance_ends"):
        t.implied_if(not getattr(plan, name), name, "PipelineModule spreads layers by its partition_method")


def _optimizer(t: Translation) -> dict[str, Any]:
    name = t.give("optimizer")
    parameters: dict[str, Any] = {"lr": 3e-4}
    if name == "sgd":  # torch.optim.SGD, which takes these switches
        parameters |= t.word("optimizer_impl")
    elif name == "muon":
        if not t.plan.shards_optimizer:
            t.refuse("optimizer", "DeepSpeed runs the products of Muon in ZeRO only; use zero_stage 1, 2 or 3")
        t.implied_if(t.plan.optimizer_impl == "fused", "optimizer_impl", "DeepSpeed runs its own kernels")
        parameters |= {"momentum": 0.95, "weight_decay": 0.1}
    else:
        t.implied_if(t.plan.optimizer_impl == "fused", "optimizer_impl", "DeepSpeed runs its FusedAdam")
        parameters |= {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1 if name == "adamw" else 0.0}
    t.remark("optimizer: learning rate and its schedule are yours; lr 3e-4 is a placeholder")
    return {"optimizer": {"type": t.word("optimizer"), "params": parameters}}


def _checkpointing(t: Translation) -> dict[str, Any]:
    mode = t.give("activation_checkpointing")
    if mode == "none":
        return {}
    t.remark(f"activation_checkpointing {mode}: your model calls deepspeed.checkpointing.checkpoint on its layers")
    if mode == "selective":
        t.note("selective_policy", "your model's checkpoints decide what is recomputed")
    t.implied_if(t.plan.checkpoint_every == 1, "checkpoint_every", "checkpoint every n-th layer in your model")
    return {"activation_checkpointing": {"partition_activations": False, "contiguous_memory_optimization": False}}
