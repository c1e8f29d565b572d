"""Reads the job configurations of torchtitan 0.1 and 0.2, which are TOML files.

Source of the keys and of their defaults: torchtitan 0.1.0 and 0.2.2, config/job_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.common.errors import ForerunError
from forerun.common.toml_files import parse_toml
from forerun.describe.kernels.attention import names_in
from forerun.describe.model.fields import Fields
from forerun.describe.plan.complete import REST
from forerun.describe.recipe.recipe import Recipe
from forerun.describe.recipe.torchtitan_model import model_of
from forerun.describe.recipe.words import words_of

TOOL = "torchtitan-0.2"
_FORMER = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "float8.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
}
"""names of torchtitan 0.1 and before -> names of 0.2"""
_NO_COST = ("job.", "profiling.", "metrics.", "lr_scheduler.", "checkpoint.", "comm.", "validation.", "model.hf_assets")
"""beginnings of settings that change neither the time nor the memory of a step"""
_FREE = {
    *("training.steps", "training.dataset", "training.dataset_path", "training.max_norm", "training.seed"),
    *("optimizer.lr", "optimizer.eps", "optimizer.weight_decay", "model.tokenizer_path", "optimizer.beta1"),
    *(
        "optimizer.beta2",
        "training.deterministic",
        "activation_checkpoint.early_stop",
        "training.mixed_precision_reduce",
    ),
    *("quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp", "quantize.linear.float8.filter_fqns"),
    *("quantize.linear.mx.recipe_name", "quantize.linear.mx.filter_fqns", "experimental.custom_import"),
    *("float8.precompute_float8_dynamic_scale_for_fsdp", "float8.filter_fqns", "training.gc_freq"),
    *("training.warmup_steps", "activation_checkpoint.selective_ac_option"),
}
"""single settings of that kind, and those that only say more about one that is read"""


def read_torchtitan(text: str, path: Path) -> Recipe:
    """Returns the recipe in a TOML text. Raises ForerunError for any other text."""
    settings = flat(parse_toml(text, str(path)))
    former = [key for key in settings if key in _FORMER]
    for key in former:
        settings.setdefault(_FORMER[key], settings.pop(key))
    fields = Fields(settings, str(path))
    if not any(key.startswith(("training.", "model.", "parallelism.")) for key in settings):
        raise ForerunError(f"{path}: has none of the tables [model], [training] and [parallelism] of torchtitan")
    mesh = _mesh(fields)
    values = _batch(fields) | mesh | _pipeline(fields) | _precision(fields, sharded=mesh["zero_stage"] == 3)
    values |= _checkpointing(fields) | _rest(fields)
    values["stack"] = "torchtitan-0.1" if former else "torchtitan"
    model, attention, why = model_of(fields, path)
    kernel = next((name for name, own in names_in(TOOL).items() if own == attention), None)
    if attention == "flex" and kernel is not None:
        values["attention"] = kernel
    batch = fields.integer("training.global_batch_size", 0, -1)
    unused = [key for key in fields.unread(_FREE) if not key.startswith(_NO_COST)]
    return Recipe(str(path), TOOL, values, model, why, global_batch=batch if batch > 0 else None, unused=tuple(unused))


def flat(tables: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Returns the values of nested tables by their keys, joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + str(key): value}
    return found


def _word(fields: Fields, name: str, default: str) -> Any:
    """Returns the value of plan field `name` for torchtitan's word in the file."""
    own = words_of(TOOL)
    key = own.keys[name]
    word = fields.text(key, default)
    value = own.value_of(name, word)
    if value is None:
        raise fields.error(key, f"{word!r} is not known; known: {', '.join(map(str, own.words[name].values()))}")
    return value


def _batch(fields: Fields) -> dict[str, Any]:
    local = fields.integer("training.local_batch_size", 8)
    stages = fields.integer(words_of(TOOL).keys["pp"], 1)
    values: dict[str, Any] = {"seq_len": fields.integer(words_of(TOOL).keys["seq_len"], 2048)}
    micro = local
    if stages > 1:
        micro = fields.integer("parallelism.pipeline_parallel_microbatch_size", 1)
        if local % micro:
            raise fields.error("training.local_batch_size", f"{local} is not a multiple of the micro batch {micro}")
    values["micro_batch"] = micro
    if fields.integer("training.global_batch_size", 0, -1) < 1:
        values["n_microbatches"] = local // micro
    return values


def _mesh(fields: Fields) -> dict[str, Any]:
    keys = words_of(TOOL).keys
    values: dict[str, Any] = {name: fields.integer(keys[name], 1) for name in ("cp", "tp", "pp", "ep")}
    values["dp_replicate"] = fields.integer(keys["dp_replicate"], 1, -1)
    values["dp_shard"] = fields.integer(keys["dp_shard"], least=-1) if fields.stated(keys["dp_shard"]) else REST
    values["zero_stage"] = 3 if values["dp_shard"] != 1 or values["cp"] > 1 else 0
    policy = fields.text(keys["reshard_after_forward"], "default", ("default", "always", "never"))
    values["reshard_after_forward"] = policy
    if values["tp"] > 1:
        values["loss_parallel"] = not fields.flag("parallelism.disable_loss_parallel")
        values["async_tp"] = fields.flag(keys["async_tp"])
    if values["cp"] > 1:
        values["cp_method"] = _word(fields, "cp_method", "allgather")
    etp = fields.integer("parallelism.expert_tensor_parallel_degree", 1)
    if values["ep"] > 1:
        values["etp"] = etp
        if fields.text("parallelism.expert_parallel_comm_backend", "standard", ("standard", "deepep")) == "deepep":
            values["dispatcher"] = "deepep"
    for idle in ("parallelism.disable_loss_parallel", keys["async_tp"], keys["cp_method"]):
        fields.stated(idle)
    return values


def _pipeline(fields: Fields) -> dict[str, Any]:
    keys = words_of(TOOL).keys
    stages = fields.integer(keys["pp"], 1)
    fields.stated(keys["pp_schedule"])
    fields.stated("parallelism.pipeline_parallel_microbatch_size")
    if stages == 1:
        return {}
    values: dict[str, Any] = {"pp_schedule": _word(fields, "pp_schedule", "1F1B"), "balance_ends": True}
    values["virtual_stages"] = 1 if values["pp_schedule"] in ("1F1B", "GPipe") else 2
    parts = fields.items("parallelism.module_fqns_per_model_part")
    if parts:
        if not all(isinstance(part, list) and all(isinstance(one, str) for one in part) for part in parts):
            raise fields.error("parallelism.module_fqns_per_model_part", "must be lists of names of modules")
        layers = tuple(sum(name.startswith("layers.") for name in part) for part in parts)  # type: ignore[attr-defined]
        if len(layers) % stages:
            raise fields.error("parallelism.module_fqns_per_model_part", f"has {len(layers)} parts for {stages} ranks")
        values |= {"layers_per_stage": layers, "virtual_stages": len(layers) // stages, "balance_ends": False}
    return values


def _precision(fields: Fields, sharded: bool) -> dict[str, Any]:
    wide = fields.text("training.mixed_precision_param", "bfloat16", ("bfloat16", "float32"))
    values: dict[str, Any] = {"master_dtype": _word(fields, "master_dtype", "float32")}
    # FSDP casts parameters to it for compute; without FSDP it is autocast's, which widens nothing
    computes_wide = wide == "float32" and (sharded or values["master_dtype"] == "fp32")
    values["precision"] = "fp32" if computes_wide else "bf16"
    converters = fields.items("model.converters")
    fp8 = "quantize.linear.float8."
    gathers = fields.flag(f"{fp8}enable_fsdp_float8_all_gather")
    recipe = fields.text(f"{fp8}recipe_name", "tensorwise", ("tensorwise", "rowwise", "rowwise_with_gw_hp"))
    if {"quantize.linear.float8", "float8"} & set(map(str, converters)):
        values |= {"precision": "fp8", "fp8_recipe": recipe.partition("_")[0], "fp8_all_gather": gathers}
    elif {"quantize.linear.mx", "mx"} & set(map(str, converters)):
        values["precision"] = "mxfp8"
    return values


def _checkpointing(fields: Fields) -> dict[str, Any]:
    mode = fields.text("activation_checkpoint.mode", "selective", ("none", "selective", "full"))
    if mode != "selective":
        return {"activation_checkpointing": mode}
    key = "activation_checkpoint.selective_ac_option"
    option = fields.text(key, "2") if not fields.is_whole(key) else str(fields.integer(key))
    if option == "op":
        return {"activation_checkpointing": "selective", "selective_policy": "op"}
    if not option.isascii() or not option.isdecimal() or not 0 < int(option) < 1000:
        raise fields.error(key, f"must be op, or the number n of which every n-th layer is recomputed; got {option!r}")
    return {"activation_checkpointing": "full", "checkpoint_every": int(option)}


def _rest(fields: Fields) -> dict[str, Any]:
    keys = words_of(TOOL).keys
    values: dict[str, Any] = {"compile": fields.flag(keys["compile"])}
    parts = fields.items("compile.components")
    if values["compile"]:
        values["compile_loss"] = not parts or "loss" in parts
        values["compile_model"] = not parts or "model" in parts
    values["optimizer"] = _word(fields, "optimizer", "AdamW")
    values["optimizer_impl"] = _word(fields, "optimizer_impl", "fused")
    values["offload"] = "params" if fields.flag("training.enable_cpu_offload") else "none"
    return values
