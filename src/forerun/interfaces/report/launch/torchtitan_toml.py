"""torchtitan 0.2: a TOML file, and a module that adds the model's dimensions to torchtitan's families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forerun.describe.kernels.attention import names_in
from forerun.interfaces.report.launch.python_text import Call, python_text
from forerun.interfaces.report.launch.torchrun import script
from forerun.interfaces.report.launch.torchtitan_model import Family, dense_args, family_of, shared_experts
from forerun.interfaces.report.launch.torchtitan_settings import Settings, coarser_checkpointing, common_settings

if TYPE_CHECKING:
    from forerun.interfaces.report.launch.translation import Launch, Translation

CONFIG, MODULE, FLAVOR = "forerun.toml", "forerun_model", "planned"
_ARGS = {"llama3": "TransformerModelArgs", "qwen3": "Qwen3ModelArgs", "deepseek_v3": "DeepSeekV3ModelArgs"}
_MASKED = {"flex": "block_causal"}
"""mask of documents that an attention kernel of torchtitan's needs"""


def torchtitan_toml(t: Translation) -> Launch:
    """Returns the files of torchtitan 0.2. Raises ForerunError for a plan or model that it would train differently."""
    plan = t.plan
    family = family_of(t)
    if family == "qwen3" and plan.pp > 1:
        t.refuse("pp", "torchtitan 0.2 has no pipelines for its qwen3 family")
    settings = common_settings(t, family, "output")
    _refuse_mixture(t)
    settings["model"] = {"name": f"forerun_{family}", "flavor": FLAVOR, "converters": []}
    settings["experimental"] = {"custom_import": MODULE}
    _parallelism(t, settings)
    _checkpointing(t, settings)
    _optimizer(t, settings)
    _quantize(t, settings)
    attention = _attention(t)
    order = ("model", "experimental", "training", "parallelism", "activation_checkpoint", "compile", "optimizer")
    tables = {name: settings[name] for name in (*order, *(k for k in settings if k not in order))}
    t.remark("data, tokenizer, learning rate and checkpoints are torchtitan's defaults; set them in forerun.toml")
    command = ["-m torchtitan.train", f'--job.config_file "$HERE/{CONFIG}"']
    return t.finish(
        {
            CONFIG: toml_text(tables, f"torchtitan 0.2: {t.title}"),
            f"{MODULE}.py": _module(t, family, attention),
            "launch.sh": script(t, command, ['export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"']),
        }
    )


def _refuse_mixture(t: Translation) -> None:
    """Refuses combinations of settings that torchtitan 0.2 runs only with FSDP. Source: torchtitan 0.2.2,
    distributed/utils.py, maybe_enable_amp.
    """
    plan = t.plan
    replicated = plan.dp_replicate * (plan.dp_shard if plan.zero_stage == 0 else 1)
    sharded = plan.shards_parameters
    if not sharded and replicated > 1 and plan.tp * plan.pp > 1:
        t.refuse("dp_replicate", "torchtitan 0.2 replicates only where no other axis is above 1; shard with dp_shard")
    if not sharded and plan.tp * plan.pp > 1 and plan.precision != "fp32" and plan.master_dtype != "bf16":
        t.refuse("precision", "torchtitan 0.2 mixes precisions only with dp_shard or cp above 1, or without tp and pp")
    if not sharded and plan.precision in ("fp32", "tf32") and plan.master_dtype == "bf16":
        t.refuse("precision", "torchtitan 0.2 widens bf16 weights for compute only with dp_shard or cp above 1")


def _parallelism(t: Translation, settings: Settings) -> None:
    plan, parallelism = t.plan, settings["parallelism"]
    if plan.tp > 1:
        t.implied_if(
            bool(plan.sequence_parallel), "sequence_parallel", "torchtitan 0.2 always splits the sequence over tp"
        )
        parallelism["disable_loss_parallel"] = not t.give("loss_parallel")
        if plan.async_tp and not plan.compiles_layers:
            t.note("async_tp", "torchtitan overlaps tensor-parallel collectives only in compiled layers")
        else:
            parallelism |= t.entries("async_tp")
    if plan.cp > 1 and plan.cp_method == "ulysses":
        parallelism[t.own.keys["cp_method"].rpartition(".")[2]] = t.own.words["cp_method"]["allgather"]
        t.note("cp_method", "torchtitan has no exchange of heads; keys and values are gathered")
    elif plan.cp > 1:
        parallelism |= t.entries("cp_method")
    if plan.ep > 1:
        parallelism["expert_tensor_parallel_degree"] = plan.tp
        if plan.tp > 1:
            t.remark(f"ep {plan.ep}: torchtitan splits experts over tp {plan.tp} too; predicted whole on each rank")
    t.implied_if(not plan.cuda_graphs, "cuda_graphs", "torchtitan 0.2 launches each kernel")


def _checkpointing(t: Translation, settings: Settings) -> None:
    mode, every = t.give("activation_checkpointing"), t.plan.checkpoint_every
    section: dict[str, Any] = {"mode": mode}
    if mode == "full" and every > 1:
        section = {"mode": "selective", "selective_ac_option": str(t.give("checkpoint_every"))}
    elif mode == "selective" and t.plan.selective_policy == "op":
        section["selective_ac_option"] = t.give("selective_policy")
        t.implied_if(every == 1, "checkpoint_every", "torchtitan applies the policy op to every layer")
    elif mode == "selective":
        coarser_checkpointing(t)
        params = t.plan.selective_policy == "params"
        section = {"mode": "none"} if params else {"mode": "selective", "selective_ac_option": str(every)}
        t.give("checkpoint_every")
    t.implied("checkpoint_every")
    settings["activation_checkpoint"] = section


def _optimizer(t: Translation, settings: Settings) -> None:
    settings["optimizer"] = t.entries("optimizer", "optimizer_impl")


def _quantize(t: Translation, settings: Settings) -> None:
    plan = t.plan
    if plan.precision == "nvfp4":
        t.refuse("precision", "torchtitan 0.2 has no nvfp4; its version 0.3 has")
    if plan.precision == "mxfp8":
        settings["model"]["converters"] = ["quantize.linear.mx"]
        settings["quantize.linear.mx"] = {"recipe_name": "mxfp8_cublas", "filter_fqns": ["output"]}
        t.implied_if(not plan.fp8_all_gather, "fp8_all_gather", "torchtitan gathers parameters of mxfp8 in bf16")
        t.scaled_in_blocks()
    elif plan.precision == "fp8":
        if plan.fp8_recipe not in ("tensorwise", "rowwise", "none"):
            t.refuse("fp8_recipe", "torchtitan scales fp8 tensorwise or rowwise")
        settings["model"]["converters"] = ["quantize.linear.float8"]
        if plan.fp8_recipe == "none":
            t.remark("fp8_recipe none: tensorwise is written")
        rowwise = t.give("fp8_recipe") == "rowwise"
        section: dict[str, Any] = {"filter_fqns": ["output"]}
        if rowwise:
            section["recipe_name"] = "rowwise"
            t.implied_if(not plan.fp8_all_gather, "fp8_all_gather", "rowwise scaling gathers parameters in bf16")
        else:
            section["enable_fsdp_float8_all_gather"] = t.give("fp8_all_gather")
            section["precompute_float8_dynamic_scale_for_fsdp"] = plan.fp8_all_gather
        settings["quantize.linear.float8"] = section
    else:
        t.implied("fp8_recipe", "fp8_all_gather")


def _attention(t: Translation) -> str:
    plan = t.plan
    name = names_in("torchtitan-0.2").get(plan.attention)
    if name in _MASKED and plan.cp == 1:
        t.give("attention")
        return str(name)
    fits = plan.attention == "auto" or name == "sdpa"
    t.implied_if(fits, "attention", "torchtitan 0.2 calls scaled_dot_product_attention, which chooses the kernel")
    return "sdpa"


def _module(t: Translation, family: Family, attention: str) -> str:
    """Returns Python that registers the family with one flavor more. Source of the names: torchtitan 0.2.2,
    models/*."""
    args = _mla_args(t) if family == "deepseek_v3" else dense_args(t, family)
    args |= {"attn_type": attention, "attn_mask_type": _MASKED.get(attention, "causal")}
    imports = [f"from torchtitan.models.{family} import {_ARGS[family]}, get_train_spec"]
    if family == "llama3":
        args |= _feed_forward(t.model.hidden, t.model.ffn_hidden)
    elif family == "qwen3":
        args |= {"hidden_dim": t.model.ffn_hidden, "head_dim": t.model.head_dim, "qk_norm": t.model.qk_norm}
        args["enable_weight_tying"] = t.model.tied_embeddings
    if t.model.moe:
        imports.append("from torchtitan.models.moe import MoEArgs")
        args |= {"moe_inter_dim": t.model.moe.expert_ffn} | ({"moe_enabled": True} if family == "qwen3" else {})
    if family == "llama3" and t.model.tied_embeddings:
        t.refuse_model("torchtitan 0.2's llama3 has an output layer of its own; tied_embeddings needs version 0.3")
    if t.model.moe:
        args["moe_args"] = Call("MoEArgs", _expert_args(t, family))
    return "\n".join(
        [
            f'"""Flavor {FLAVOR} of forerun_{family} for torchtitan 0.2: {t.title}."""',
            "",
            "from dataclasses import replace",
            "",
            *imports,
            "from torchtitan.protocols.train_spec import register_train_spec",
            "",
            f"ARGS = {python_text(Call(_ARGS[family], args))}",
            f'register_train_spec("forerun_{family}", replace(get_train_spec(), model_args={{"{FLAVOR}": ARGS}}))',
            "",
        ]
    )


def _feed_forward(hidden: int, ffn_hidden: int) -> dict[str, Any]:
    """Returns the settings of the width. llama3 rounds 8/3 x hidden x ffn_dim_multiplier up to a multiple of
    multiple_of: one multiple is the exact width. Source: torchtitan 0.2.2, models/llama3/model/model.py,
    FeedForward."""
    return {"multiple_of": ffn_hidden, "ffn_dim_multiplier": ffn_hidden / (4 * hidden)}


def _mla_args(t: Translation) -> dict[str, Any]:
    model = t.model
    assert model.mla is not None
    assert model.moe is not None
    args = dense_args(t, "deepseek_v3")
    del args["n_kv_heads"]
    return args | {
        "inter_dim": model.ffn_hidden,
        "n_dense_layers": model.moe.n_dense_layers,
        t.own.sizes["mla.q_lora_rank"]: model.mla.q_lora_rank or 0,
        t.own.sizes["mla.kv_lora_rank"]: model.mla.kv_lora_rank,
        **{
            t.own.sizes[f"mla.{name}"]: getattr(model.mla, name)
            for name in ("qk_nope_dim", "qk_rope_dim", "v_head_dim")
        },
    }


def _expert_args(t: Translation, family: Family) -> dict[str, Any]:
    moe = t.model.moe
    assert moe is not None
    score = "sigmoid" if moe.router_bias else "softmax"
    t.remark(f"router: {score} scores of the chosen experts, normalised; check it against the model's own")
    names = ("n_experts", "top_k", *(("n_groups", "top_groups") if moe.n_groups > 1 else ()))
    return {
        **{t.own.sizes[f"moe.{name}"]: getattr(moe, name) for name in names},
        "num_shared_experts": shared_experts(t.model),
        "score_func": score,
        "route_norm": True,
        "score_before_experts": False,
        "load_balance_coeff": 1e-3 if moe.router_bias else None,
    }


def toml_text(tables: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    """Returns one table for each name (dotted names are tables inside tables), after lines of comment."""
    parts = ["\n".join(f"# {line}".rstrip() for line in comment.splitlines())]
    for name, values in tables.items():
        if values:
            parts.append("\n".join([f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items())]))
    return "\n\n".join(parts) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        items = [_value(item) for item in value]
        nested = any(isinstance(item, list) for item in value)
        return "[\n" + "".join(f"    {item},\n" for item in items) + "]" if nested else f"[{', '.join(items)}]"
    return repr(value)
