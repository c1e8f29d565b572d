"""Reads the arguments of Megatron-LM's pretrain_gpt.py, from a shell script, a list, or a YAML file of the same names.

Source of the names and of their defaults: NVIDIA/Megatron-LM core r0.16,
megatron/training/arguments.py. NeMo 2 and Megatron Bridge dump the fields of the same classes, with underscores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.common.errors import ForerunError
from forerun.describe.kernels.attention import names_in
from forerun.describe.model.fields import Fields
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.complete import REST
from forerun.describe.recipe.megatron_model import model_of
from forerun.describe.recipe.recipe import Recipe
from forerun.describe.recipe.shell import words_of_script
from forerun.describe.recipe.words import words_of

TOOL = "megatron-lm"
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_FP8_RECIPES = {"delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "block"}
_NO_COST = re.compile(
    r"(lr|min-lr|decoupled|save|load|data|tokenizer|eval|log|tensorboard|wandb|train-|weight-decay|adam|clip-grad|exit"
    r"|init-method|seed|split|num-workers|distributed|master|node|rdzv|vocab-file|merge-file|merges|mock|override|ckpt"
    r"|rotary|dist-|profile|start-weight|end-weight|mmap|no-mmap|no-load|no-save|norm-epsilon|use-mcore|mmap|transformer-impl"
    r"|moe-aux|moe-router-load|moe-router-dtype|moe-z|manual-gc|no-create|no-check|nproc|max-position|tiktoken|bf16$|async-save"
    r"|use-rotary|deterministic|use-persistent|make-vocab|no-position|no-rope|legacy|timing|barrier|enable-experimental|disable-straggler"
    r"|attention-softmax|no-masked|cross-entropy|use-flash|num-nodes|devices|name$|finetune|use-checkpoint).*"
)
"""arguments that change neither the time nor the memory of a step, or that the stack decides"""
_BRIDGE = {
    "devices": "nproc-per-node",
    "gpus-per-node": "nproc-per-node",
    "num-nodes": "nnodes",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "moe-ffn-hidden": "moe-ffn-hidden-size",
}
"""names of NeMo and Megatron Bridge -> names of Megatron-LM's arguments"""
_OPPOSITE = {
    "share-embeddings-and-output-weights": "untie-embeddings-and-output-weights",
    "add-bias-linear": "disable-bias-linear",
}
"""switches of NeMo and Megatron Bridge -> the argument that says the opposite"""


def read_script(text: str, path: Path) -> Recipe:
    """Returns the recipe in a shell script, or in a text of arguments. Raises ForerunError."""
    return _recipe(_options(words_of_script(text, str(path))), path)


def read_arguments(data: Any, path: Path) -> Recipe:
    """Returns the recipe in the contents of a YAML file: arguments with or without their values, or fields of NeMo."""
    if isinstance(data, Mapping) and isinstance(data.get("MODEL_ARGS"), Mapping):
        data = data["MODEL_ARGS"]
    if isinstance(data, Sequence) and not isinstance(data, str):
        return _recipe(_options([part for one in data for part in str(one).split()]), path)
    if not isinstance(data, Mapping):
        raise ForerunError(f"{path}: expected the arguments of Megatron-LM, or the fields of a NeMo recipe")
    return _recipe(_of_fields(data), path)


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Returns arguments with their values: True for none, a list for several."""
    found: dict[str, Any] = {}
    values: list[Any] = []
    name = ""
    for word in [*(word for word in words if not word.endswith(".py") and word != "$@"), "--"]:
        if not word.startswith("--"):
            values.append(_scalar(word))
            continue
        if name:
            found[name] = values if len(values) > 1 else values[0] if values else True
        name, _, value = word[2:].partition("=")
        name, values = name.replace("_", "-"), [_scalar(value)] if value else []
    return found


def _scalar(word: str) -> Any:
    if re.fullmatch(r"-?\d{1,18}", word):
        return int(word)
    return float(word) if re.fullmatch(r"-?\d{0,18}\.\d{1,18}", word) else word


def _of_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of nested mappings as arguments; a field in `model` comes before one elsewhere."""
    found: dict[str, Any] = {}
    for key, value in sorted(data.items(), key=lambda one: one[0] == "model"):
        if isinstance(value, Mapping):
            found |= _of_fields(value)
            continue
        name = str(key).lstrip("-").replace("_", "-")
        if name in _OPPOSITE and isinstance(value, bool):
            found[_OPPOSITE[name]] = not value
        elif name == "gated-linear-unit":
            found["swiglu"] = value
        elif name == "mixed-precision" and isinstance(value, str):
            found["fp16" if "fp16" in value else "bf16"] = True
        elif value is not None:
            found[_BRIDGE.get(name, name)] = value
    return {name: value for name, value in found.items() if value is not False}


def _recipe(options: dict[str, Any], path: Path) -> Recipe:
    fields = Fields(options, str(path))
    keys = words_of(TOOL).keys
    if not any(fields.stated(keys[name]) for name in ("tp", "pp", "micro_batch", "seq_len")):
        raise ForerunError(
            f"{path}: has none of Megatron-LM's arguments, such as --{keys['tp']} or --{keys['seq_len']}"
        )
    model, why = model_of(fields)
    values = _mesh(fields) | _data_parallel(fields) | _precision(fields) | _rest(fields, model)
    values |= _pipeline(fields, values["pp"], model) | _checkpointing(fields, values["pp"], model)
    values["stack"] = _stack(fields)
    batch = fields.integer("global-batch-size", 0, 0)
    if not batch:
        values["n_microbatches"] = 1
    nodes, per_node = fields.value("nnodes"), fields.value("nproc-per-node")
    gpus = nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else 0
    unused = tuple(key for key in fields.unread() if not _NO_COST.fullmatch(key))
    return Recipe(str(path), TOOL, values, model, why, batch or None, gpus if gpus > 0 else None, unused)


def _mesh(fields: Fields) -> dict[str, Any]:
    keys = words_of(TOOL).keys
    values: dict[str, Any] = {name: fields.integer(keys[name], 1) for name in ("tp", "pp", "cp", "ep", "etp")}
    values["seq_len"] = fields.integer(keys["seq_len"])
    values["micro_batch"] = fields.integer(keys["micro_batch"], 1)
    if not fields.stated(keys["etp"]):
        values["etp"] = values["tp"] if fields.stated("num-experts") else 1
    values["sequence_parallel"] = fields.flag(keys["sequence_parallel"]) and values["tp"] > 1
    values["async_tp"] = fields.flag(keys["async_tp"])
    values["expert_overlap"] = fields.flag(keys["expert_overlap"])
    values["shared_expert_overlap"] = fields.flag(keys["shared_expert_overlap"])
    fields.stated("delay-wgrad-compute")
    if values["cp"] > 1:
        own = words_of(TOOL)
        word = fields.text(keys["cp_method"], "p2p")
        values["cp_method"] = own.value_of("cp_method", word)
        if values["cp_method"] is None:
            raise fields.error(
                keys["cp_method"], f"{word!r} is not known; known: {', '.join(own.words['cp_method'].values())}"
            )
    if fields.stated("num-experts"):
        kind = fields.text("moe-token-dispatcher-type", "allgather", ("allgather", "alltoall", "flex"))
        values["dispatcher"] = fields.text("moe-flex-dispatcher-backend", "deepep") if kind == "flex" else kind
    return values


def _data_parallel(fields: Fields) -> dict[str, Any]:
    keys = words_of(TOOL).keys
    stage = 1 if fields.flag("use-distributed-optimizer") else 0
    strategy = fields.text("data-parallel-sharding-strategy", "no_shard", _STRATEGIES)
    if fields.flag("use-megatron-fsdp") or fields.flag("use-custom-fsdp"):
        stage = _STRATEGIES[strategy]
    elif fields.flag("use-torch-fsdp2"):
        stage = 3
    if fields.value(keys["optimizer"]) == "dist_muon":
        stage = 1
    values: dict[str, Any] = {"dp_shard": REST, "zero_stage": stage}
    values["dp_replicate"] = fields.integer("num-distributed-optimizer-instances", 1)
    values["overlap_grad_reduce"] = fields.flag(keys["overlap_grad_reduce"])
    fields.stated("overlap-param-gather")
    fields.stated("no-gradient-accumulation-fusion")
    bucket = fields.integer("ddp-bucket-size", 0, 0, 2**40)
    wide = 2 if fields.flag("grad-reduce-in-bf16") else 4
    return values | ({"ddp_bucket_mib": bucket * wide / 2**20} if bucket else {})


def _precision(fields: Fields) -> dict[str, Any]:
    half = fields.flag("fp16")
    values: dict[str, Any] = {"precision": "fp16" if half else "bf16" if fields.flag("bf16") else "fp32"}
    narrow = "fp16" if half else "bf16"
    if fields.flag("accumulate-allreduce-grads-in-fp32"):
        values |= {"reduce_dtype": "fp32", "accumulate_dtype": "fp32"}
    elif fields.flag("grad-reduce-in-bf16") or half:
        values |= {"reduce_dtype": narrow, "accumulate_dtype": narrow}
    recipe = fields.text("fp8-recipe", "delayed", ("mxfp8", *_FP8_RECIPES))
    if fields.stated("fp8-format") or fields.stated("fp8"):
        of_fp8 = {"precision": "fp8", "fp8_recipe": _FP8_RECIPES.get(recipe)}
        values |= {"precision": "mxfp8"} if recipe == "mxfp8" else of_fp8
    if fields.stated("fp4-format"):
        fields.stated("fp4-recipe")
        values["precision"] = "nvfp4"
    values["fp8_all_gather"] = fields.flag(words_of(TOOL).keys["fp8_all_gather"])
    return values


def _pipeline(fields: Fields, stages: int, model: ModelSpec | None) -> dict[str, Any]:
    keys = words_of(TOOL).keys
    virtual = fields.integer(keys["virtual_stages"], 1)
    each = fields.integer("num-layers-per-virtual-pipeline-stage", 0, 0)
    if each and model is not None:
        virtual = max(1, model.n_layers // (stages * each))
    ends = [fields.flag(f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
    layout = fields.text("pipeline-model-parallel-layout", "")
    inside = fields.flag("use-tp-pp-dp-mapping")
    if stages == 1:
        return {}
    values: dict[str, Any] = {"virtual_stages": virtual, "balance_ends": all(ends)}
    if layout:
        whole = re.sub(r"\(([^()]{0,200})\)\*(\d{1,3})", lambda found: found.group(1) * int(found.group(2)), layout)
        layers = tuple(_layers(stage, fields) for stage in whole.split("|"))
        values |= {"layers_per_stage": layers, "virtual_stages": max(1, len(layers) // stages)}
    if inside:
        values["mesh_order"] = words_of(TOOL).constants["pipeline_inside"]
    return values | {"pp_schedule": "Interleaved1F1B" if values["virtual_stages"] > 1 else "1F1B"}


def _layers(stage: str, fields: Fields) -> int:
    """Returns the layers of one stage of a layout such as `Et*3`, in which each t is a layer."""
    plain = re.sub(r"t\*(\d{1,4})", lambda found: "t" * int(found.group(1)), stage)
    if not re.fullmatch(r"[EtmL,]*", plain):
        raise fields.error(
            "pipeline-model-parallel-layout", f"has the stage {stage!r:.40}, where only E, t, m and L stand"
        )
    return plain.count("t")


def _checkpointing(fields: Fields, stages: int, model: ModelSpec | None) -> dict[str, Any]:
    kinds = ("full", "selective")
    granularity = fields.text("recompute-granularity", "", kinds) if fields.stated("recompute-granularity") else ""
    if fields.flag("recompute-activations"):
        granularity = "selective"
    method = fields.text("recompute-method", "uniform", ("uniform", "block"))
    layers = fields.integer("recompute-num-layers", 1)
    modules = fields.value("recompute-modules")
    if granularity == "full":
        of_stage = -(-model.n_layers // stages) if model is not None else layers
        every = max(1, of_stage // layers) if method == "block" else 1
        return {"activation_checkpointing": "full", "checkpoint_every": every}
    if granularity != "selective":
        return {"activation_checkpointing": "none"}
    listed = [str(one) for one in modules] if isinstance(modules, list) else [str(modules or "core_attn")]
    policies = words_of(TOOL).constants["recompute_modules"]
    policy = next((name for name, same in policies.items() if same == listed), None)
    chosen = {"selective_policy": policy} if policy else {"recompute_modules": tuple(listed)}
    return {"activation_checkpointing": "selective"} | chosen


def _rest(fields: Fields, model: ModelSpec | None) -> dict[str, Any]:
    keys = words_of(TOOL).keys
    values: dict[str, Any] = {}
    backend = fields.text(keys["attention"], "auto")
    kernels = [name for name, own in names_in(TOOL).items() if own == backend]
    if kernels:
        values["attention"] = "flash3" if "flash3" in kernels else kernels[0]
    elif backend not in ("auto", "local"):
        raise fields.error(keys["attention"], f"{backend!r} is not known")
    name = fields.text(keys["optimizer"], "adam")
    known = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
    if name not in known:
        raise fields.error(keys["optimizer"], f"{name!r} is not known; known: {', '.join(known)}")
    values["optimizer"] = "adam" if name == "adam" and fields.is_zero("weight-decay") else known[name]
    graphs = fields.flag("enable-cuda-graph") or fields.text("cuda-graph-impl", "none") != "none"
    values["cuda_graphs"] = graphs
    offloads = fields.flag("offload-optimizer-states") or fields.flag("optimizer-cpu-offload")
    values["offload"] = "optimizer" if offloads else "none"
    fields.stated("muon-tp-mode")
    layers = fields.integer("cpu-offloading-num-layers", 0, 0)
    if layers and model is not None:
        values["activation_offload"] = min(1.0, layers / model.n_layers)
    return values


def _stack(fields: Fields) -> str:
    """Returns Megatron-Core with its own layers where the recipe asks for them, else with Transformer Engine's."""
    return "megatron-core-local" if fields.value("transformer-impl") == "local" else "megatron-core"
