"""Reads ds_config.json of DeepSpeed, and the YAML file of `accelerate launch`. Neither states the model or the sequence
length.

Source of the keys: deepspeedai/DeepSpeed v0.19, deepspeed/runtime/config.py and runtime/zero/config.py;
huggingface/accelerate 1.15, commands/config/config_args.py and parallelism_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.common.admission import parse_json
from forerun.common.errors import ForerunError
from forerun.describe.model.fields import Fields
from forerun.describe.plan.complete import REST
from forerun.describe.recipe.recipe import Recipe
from forerun.describe.recipe.torchtitan import flat

_NO_COST = ("optimizer.params.", "scheduler.", "zero_optimization.", "fp16.", "bf16.", "wall_clock", "steps_per_print")
_FREE = (
    *("gradient_clipping", "compute_environment", "machine_rank", "main_training_function", "rdzv_backend", "debug"),
    *("same_network", "num_machines", "use_cpu", "main_process_port", "downcast_bf16", "enable_cpu_affinity"),
    *("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "fsdp_config.fsdp_version", "fsdp_config.fsdp_state_dict_type"),
    *("fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_transformer_layer_cls_to_wrap"),
    *("fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_sync_module_states"),
)


def read_deepspeed(text: str, path: Path) -> Recipe:
    """Returns the recipe in a ds_config.json. Raises ForerunError for any other file."""
    fields = _fields(parse_json(text, str(path)), path)
    if not any(fields.stated(key) for key in ("train_micro_batch_size_per_gpu", "train_batch_size")) and not (
        fields.stated("zero_optimization.stage")
    ):
        raise ForerunError(f"{path}: has neither train_batch_size nor zero_optimization of DeepSpeed")
    values: dict[str, Any] = {"stack": "deepspeed", "dp_shard": REST}
    values["zero_stage"] = fields.integer("zero_optimization.stage", 0, 0, 3)
    values["overlap_grad_reduce"] = fields.flag("zero_optimization.overlap_comm", True)
    values["tp"] = fields.integer("tensor_parallel.autotp_size", 1)
    values["cp"] = fields.integer("sequence_parallel_size", 1)
    if values["cp"] > 1:
        values["cp_method"] = "ulysses"
    for name, key in (
        ("micro_batch", "train_micro_batch_size_per_gpu"),
        ("n_microbatches", "gradient_accumulation_steps"),
    ):
        if fields.stated(key):
            values[name] = fields.integer(key)
    half, narrow = fields.flag("fp16.enabled"), fields.flag("bf16.enabled")
    values["precision"] = "fp16" if half else "bf16" if narrow else "fp32"
    if fields.flag("bf16.bf16_master_weights_and_grads"):
        values["master_dtype"] = "bf16"
    places = {name: fields.text(f"zero_optimization.offload_{name}.device", "none") for name in ("param", "optimizer")}
    away = next((name for name, place in places.items() if place != "none"), "none")
    values["offload"] = {"param": "params"}.get(away, away)
    known = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd", "muon": "muon"}
    name = fields.text("optimizer.type", "AdamW")
    if name.lower() not in known:
        raise fields.error("optimizer.type", f"{name!r} is not known; known: AdamW, Adam, SGD, Muon")
    values["optimizer"] = known[name.lower()]
    if fields.is_zero("optimizer.params.weight_decay") and name.lower() == "adam":
        values["optimizer"] = "adam"
    batch = fields.integer("train_batch_size", 0, 0)
    return _recipe(fields, path, "deepspeed", values, batch or None, None)


def read_accelerate(data: Mapping[str, Any], path: Path) -> Recipe:
    """Returns the recipe in the YAML file of `accelerate launch`. Raises ForerunError for a wrong value."""
    fields = _fields(data, path)
    kinds = ("FSDP", "MULTI_GPU", "NO")
    kind = fields.text("distributed_type", "NO")
    if kind not in kinds:
        raise fields.error(
            "distributed_type", f"{kind!r} is not read, only {', '.join(kinds)}; give DeepSpeed's own file"
        )
    values: dict[str, Any] = {"stack": "pytorch", "dp_shard": REST, "zero_stage": 3 if kind == "FSDP" else 0}
    precisions = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
    values["precision"] = precisions[fields.text("mixed_precision", "no", precisions)]
    axes = {"dp_replicate": 1, "dp_shard": REST, "tp": 1, "cp": 1}
    for name, default in axes.items():
        key = f"parallelism_config.parallelism_config_{name}_size"
        values[name] = fields.integer(key, least=-1) if fields.stated(key) else default
    if kind == "FSDP":
        again = fields.value("fsdp_config.fsdp_reshard_after_forward") in (None, True, "true", "FULL_SHARD")
        values["reshard_after_forward"] = "default" if again else "never"
        values["offload"] = "params" if fields.flag("fsdp_config.fsdp_offload_params") else "none"
        whole = fields.flag("fsdp_config.fsdp_activation_checkpointing")
        values["activation_checkpointing"] = "full" if whole else "none"
    compiled = fields.text("dynamo_config.dynamo_backend", "NO").upper()
    fields.stated("dynamo_config.dynamo_use_regional_compilation")
    values["compile"] = compiled != "NO"
    return _recipe(fields, path, "accelerate", values, None, fields.integer("num_processes", 1))


def _fields(data: Any, path: Path) -> Fields:
    if not isinstance(data, Mapping):
        raise ForerunError(f"{path}: expected keys and values")
    return Fields({key: value for key, value in flat(data).items() if value not in ("auto", None)}, str(path))


def _recipe(
    fields: Fields, path: Path, tool: str, values: dict[str, Any], batch: int | None, gpus: int | None
) -> Recipe:
    unused = [key for key in fields.unread(_FREE) if not key.startswith(_NO_COST)]
    why = f"a file of {tool} does not say the model"
    return Recipe(str(path), tool, values, None, why, batch, gpus, tuple(unused))
