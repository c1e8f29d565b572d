"""Reads the model from the arguments of Megatron-LM.

Source of the defaults: NVIDIA/Megatron-LM core r0.16, megatron/training/arguments.py.
"""

from __future__ import annotations

import re
from typing import Any

from forerun.common.errors import at
from forerun.describe.model.fields import Fields
from forerun.describe.model.spec import MLASpec, ModelSpec, MoESpec
from forerun.describe.recipe.words import words_of

_TOOL = "megatron-lm"
_FREQUENCY = re.compile(r"\(?\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})\)?")
_POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none"}


def model_of(fields: Fields) -> tuple[ModelSpec | None, str]:
    """Returns the model, or a clause that says which argument it lacks. Raises ForerunError for a wrong value."""
    sizes = words_of(_TOOL).sizes
    tokenizer = fields.text("tokenizer-type", "GPT2BPETokenizer" if fields.stated("merge-file") else "")
    vocab = words_of(_TOOL).constants["vocabularies"].get(tokenizer, 0)
    for name in ("n_layers", "hidden", "n_heads", "vocab"):
        if not fields.stated(sizes[name]) and not (name == "vocab" and vocab):
            return None, f"the recipe does not say --{sizes[name]}"
    values: dict[str, Any] = {name: fields.integer(sizes[name]) for name in ("n_layers", "hidden", "n_heads")}
    values["vocab"] = fields.integer(sizes["vocab"], vocab)
    hidden, gated = values["hidden"], fields.flag("swiglu")
    values["ffn_hidden"] = fields.integer(sizes["ffn_hidden"], hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
    values["head_dim"] = fields.integer(sizes["head_dim"], hidden // values["n_heads"])
    grouped = fields.flag("group-query-attention") or fields.stated(sizes["n_kv_heads"])
    values["n_kv_heads"] = fields.integer(sizes["n_kv_heads"], 1) if grouped else values["n_heads"]
    values |= _layer(fields, gated)
    values["mtp_modules"] = fields.integer("mtp-num-layers", 0, 0)
    fields.stated("mtp-loss-scaling-factor")
    with at(fields.place):
        if fields.flag("multi-latent-attention"):
            names = ("kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_head_dim")
            widths: dict[str, Any] = {
                name: fields.integer(sizes[f"mla.{name}"], default)
                for name, default in zip(names, (32, 128, 64, 128), strict=True)
            }
            rank = fields.integer(sizes["mla.q_lora_rank"], 0, 0)
            values["mla"] = MLASpec(q_lora_rank=rank or None, **widths)
            values |= {"head_dim": widths["v_head_dim"], "n_kv_heads": values["n_heads"]}
        if fields.stated(sizes["moe.n_experts"]):
            values["moe"] = _moe(fields, values["ffn_hidden"])
        return ModelSpec(name=f"{values['n_layers']} layers of {hidden}", **values), ""


def _layer(fields: Fields, gated: bool) -> dict[str, Any]:
    relu2 = fields.flag("squared-relu")
    norm = fields.text("normalization", "LayerNorm", ("LayerNorm", "RMSNorm"))
    word = fields.text("position-embedding-type", "learned_absolute", _POSITIONS)
    position = "rope" if fields.flag("use-rotary-position-embeddings") else _POSITIONS[word]
    biased = not fields.flag("disable-bias-linear")
    values: dict[str, Any] = {
        "mlp": "swiglu" if gated else "relu2" if relu2 else "gelu",
        "norm": "rmsnorm" if norm == "RMSNorm" else "layernorm",
        "norm_bias": norm == "LayerNorm",
        "position": position,
        "max_positions": fields.integer("max-position-embeddings", 0, 0) if position == "learned" else 0,
        "tied_embeddings": not fields.flag("untie-embeddings-and-output-weights"),
        "qkv_bias": biased or fields.flag("add-qkv-bias"),
        "out_bias": biased,
        "mlp_bias": biased,
        "qk_norm": fields.flag("qk-layernorm"),
        "rope_theta": fields.number("rotary-base"),
    }
    for name in ("attention_dropout", "hidden_dropout"):
        rate = fields.probability(name.replace("_", "-"))
        values[name] = None if rate is None else rate > 0
    if fields.stated("window-size"):
        window = re.match(r"\(?(\d{1,9}),", str(fields.value("window-size")))
        if window is None:
            raise fields.error("window-size", "must be two numbers joined by a comma, such as 128,0")
        values["sliding_window"] = int(window.group(1))
    return values


def _moe(fields: Fields, ffn_hidden: int) -> MoESpec:
    sizes = words_of(_TOOL).sizes
    dense = 0
    frequency = fields.value("moe-layer-freq")
    if frequency not in (None, 1):
        found = _FREQUENCY.fullmatch(re.sub(r"\s", "", str(frequency)))
        if found is None:
            raise fields.error(
                "moe-layer-freq", f"must be 1, or dense layers before others as [0]*3+[1]*58; got {frequency!r:.60}"
            )
        dense = int(found.group(1))
    fields.stated("moe-grouped-gemm")
    fields.stated("moe-router-score-function")
    return MoESpec(
        n_experts=fields.integer(sizes["moe.n_experts"]),
        top_k=fields.integer(sizes["moe.top_k"], 2),
        expert_ffn=fields.integer(sizes["moe.expert_ffn"], ffn_hidden),
        shared_ffn=fields.integer(sizes["moe.shared_ffn"], 0, 0),
        n_dense_layers=dense,
        shared_gate=fields.flag("moe-shared-expert-gate"),
        router_bias=fields.flag("moe-router-enable-expert-bias"),
        n_groups=fields.integer(sizes["moe.n_groups"], 1),
        top_groups=fields.integer(sizes["moe.top_groups"], 1),
        capacity_factor=fields.number("moe-expert-capacity-factor"),
    )
