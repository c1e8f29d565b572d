"""Finds the torchtitan model family of an architecture, and its dimensions under that family's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from forerun.interfaces.report.launch.special_parts import special_parts

if TYPE_CHECKING:
    from forerun.describe.model.spec import ModelSpec
    from forerun.interfaces.report.launch.translation import Translation

Family = Literal["llama3", "qwen3", "deepseek_v3"]


def rope_theta(t: Translation, family: Family) -> float:
    """Returns the base of rotary embeddings: the model's, or the family's own with a remark."""
    if t.model.rope_theta:
        return t.model.rope_theta
    theta: float = t.own.constants["rope_theta"][family]
    t.remark(f"rotary base {theta:g}: {family}'s own, as the model has none here; it changes no time and no memory")
    return theta


def family_of(t: Translation) -> Family:
    """Returns torchtitan's family of the model. Raises ForerunError if it has none."""
    model = t.model
    for wrong, what in _unlike_all(model):
        if wrong:
            t.refuse_model(
                f"torchtitan's language models have no {what}; use its transformers backend or your own model"
            )
    if model.mla:
        if model.moe is None:
            t.refuse_model("torchtitan's deepseek_v3 has experts; latent attention without them is not there")
        if model.qk_norm or model.tied_embeddings or model.moe.shared_ffn % model.moe.expert_ffn:
            t.refuse_model(
                "torchtitan's deepseek_v3 has no qk_norm, no tied embeddings, and shared experts as wide as others"
            )
        return "deepseek_v3"
    if model.moe:
        if model.moe.n_dense_layers or model.moe.shared_ffn:
            t.refuse_model("torchtitan's qwen3 has experts in every layer and no shared expert")
        if not model.qk_norm:
            t.refuse_model("torchtitan has experts without qk_norm in no family (qwen3 norms queries and keys)")
        return "qwen3"
    plain = not model.qk_norm and model.head_dim * model.n_heads == model.hidden
    return "llama3" if plain else "qwen3"


def _unlike_all(model: ModelSpec) -> list[tuple[bool, str]]:
    biases = model.qkv_bias or model.out_bias or model.mlp_bias or model.head_bias
    extra = model.embedding_norm or model.token_types or model.pooler or model.head_transform
    moe = model.moe
    return [
        (model.n_heads == 0, "stack without attention"),
        (model.mtp_modules > 0, "modules that predict further tokens (mtp_modules)"),
        (model.mlp != "swiglu", f"{model.mlp} feed-forward (they have swiglu)"),
        (model.norm != "rmsnorm", f"{model.norm} (they have rmsnorm)"),
        (model.position != "rope", f"{model.position} positions (they have rope)"),
        (not model.causal, "attention without a causal mask"),
        (biases, "biases"),
        (bool(extra), "norms, types or heads of BERT"),
        (not (model.block_norms and model.final_norm), "layers without norms"),
        (model.sliding_window is not None, "sliding window"),
        (bool(moe and moe.shared_gate), "gate on shared experts"),
        (bool(moe and moe.capacity_factor), "capacity of experts (they drop no tokens)"),
        *special_parts(model),
    ]


def dense_args(t: Translation, family: Family) -> dict[str, Any]:
    """Returns the arguments that llama3 and qwen3 have in common, in version 0.2's words."""
    model = t.model
    return {
        **{
            t.own.sizes[name]: getattr(model, name) for name in ("hidden", "n_layers", "n_heads", "n_kv_heads", "vocab")
        },
        "max_seq_len": t.plan.seq_len,
        "rope_theta": rope_theta(t, family),
    }


def shared_experts(model: ModelSpec) -> int:
    """Returns how many shared experts of an expert's width a layer has."""
    assert model.moe is not None
    return model.moe.shared_ffn // model.moe.expert_ffn
