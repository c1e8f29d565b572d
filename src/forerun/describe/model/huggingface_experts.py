"""Reads the config.json of the mixture-of-experts families: Mixtral, Qwen MoE, DeepSeek.

Each reader returns the fields of ModelSpec except its name. Readers ignore keys of routing that only change the choice
of experts for a token, not their number or size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from forerun.common.errors import at
from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import attention_bias, decoder, qwen_window, window
from forerun.describe.model.layer_lists import each_layer
from forerun.describe.model.spec import LayerChanges, MLASpec, MoESpec


@family("mixtral", "MixtralForCausalLM")
def mixtral(config: Fields) -> Values:
    """Reads Mixtral: every layer has experts of width `intermediate_size`."""
    values = decoder(config, needs_kv_heads=True)
    moe = experts(config, "num_local_experts", config.integer("intermediate_size"))
    width = config.integer("sliding_window") if config.stated("sliding_window") else None
    return values | {"moe": moe} | window(config, width)


@family("qwen2_moe", "Qwen2MoeForCausalLM")
def qwen2_moe(config: Fields) -> Values:
    """Reads Qwen 1.5 and 2 MoE: one gated shared expert, biases on queries, keys and values."""
    values = decoder(config, needs_kv_heads=True) | qwen_window(config)
    shared = config.integer("shared_expert_intermediate_size")
    width = config.integer("moe_intermediate_size")
    moe = experts(config, "num_experts", width, shared, gate=True)
    return values | {"qkv_bias": config.flag("qkv_bias", True)} | qwen_experts(config, values, moe)


@family("qwen3_moe", "Qwen3MoeForCausalLM")
def qwen3_moe(config: Fields) -> Values:
    """Reads Qwen 3 MoE: no shared expert, norms on queries and keys."""
    values = decoder(config, needs_kv_heads=True) | qwen_window(config) | attention_bias(config)
    moe = experts(config, config.first_of("num_experts", "num_local_experts"), config.integer("moe_intermediate_size"))
    return values | {"qk_norm": True} | qwen_experts(config, values, moe)


@family("deepseek_v2", "DeepseekV2ForCausalLM")
def deepseek_v2(config: Fields) -> Values:
    """Reads DeepSeek-V2: latent attention, routed and shared experts."""
    if config.stated("topk_method"):
        method = config.text("topk_method", choices=("greedy", "group_limited_greedy", "noaux_tc"))
        return deepseek(config, router_bias=method == "noaux_tc", grouped=method != "greedy")
    return deepseek(config, router_bias=False, grouped=False)


@family("kimi_k2", "DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
@family("deepseek_v3", "DeepseekV3ForCausalLM")
def deepseek_v3(config: Fields) -> Values:
    """Reads DeepSeek-V3: V2 with a correction bias for each expert that balances the load (arXiv 2412.19437, 2.1.2)."""
    config.expect("topk_method", "noaux_tc")
    return deepseek(config, router_bias=True)


def deepseek(config: Fields, router_bias: bool, grouped: bool = True) -> Values:
    """Reads latent attention with routed and shared experts; with `grouped` a token first chooses groups of experts."""
    bias = config.flag("attention_bias")
    config.expect("hidden_act", "silu")
    config.expect("mlp_bias", False)
    config.expect("moe_layer_freq", 1)
    n_heads = config.integer("num_attention_heads")
    config.expect("num_key_value_heads", n_heads)
    mla = latent(config)
    moe = None
    if config.stated("n_routed_experts"):
        width = config.integer("moe_intermediate_size")
        shared = width * config.integer("n_shared_experts", 0, least=0)
        dense = min(config.integer("first_k_dense_replace", 0, least=0), config.integer("num_hidden_layers"))
        moe = experts(config, "n_routed_experts", width, shared, dense, router_bias=router_bias)
        moe = in_groups(config, moe) if grouped else moe
    else:
        for key in ("moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "num_experts_per_tok"):
            config.stated(key)
    return {
        "n_layers": config.integer("num_hidden_layers"),
        "hidden": config.integer("hidden_size"),
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "head_dim": mla.v_head_dim,
        "ffn_hidden": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "mlp": "swiglu",
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "out_bias": bias,
        "mla": mla,
        "moe": moe,
    }


def latent(config: Fields) -> MLASpec:
    return MLASpec(
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_dim=config.integer("qk_nope_head_dim"),
        qk_rope_dim=config.integer("qk_rope_head_dim"),
        v_head_dim=config.integer("v_head_dim"),
        q_lora_rank=config.integer("q_lora_rank") if config.stated("q_lora_rank") else None,
    )


def experts(
    config: Fields,
    count_key: str,
    width: int,
    shared_width: int = 0,
    dense_layers: int = 0,
    gate: bool = False,
    router_bias: bool = False,
    top_k: str = "num_experts_per_tok",
) -> MoESpec:
    """Reads a mixture whose experts have the width `width`."""
    n_experts, chosen = config.integer(count_key), config.integer(top_k)
    with at(config.place):
        return MoESpec(n_experts, chosen, width, shared_width, dense_layers, gate, router_bias)


def in_groups(config: Fields, moe: MoESpec, key: str = "n_group") -> MoESpec:
    """Returns the experts with their groups. A token first chooses some of the groups."""
    groups, chosen = config.integer(key, 1), config.integer("topk_group", 1)
    with at(config.place):
        return replace(moe, n_groups=groups, top_groups=chosen)


def qwen_experts(config: Fields, values: Values, moe: MoESpec) -> Values:
    """Reads which layers have experts: every `decoder_sparse_step`-th but those that `mlp_only_layers` keeps dense."""
    layers, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    dense = config.items("mlp_only_layers")
    return mixed(values, moe, [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)])


def mixed(values: Values, moe: MoESpec, sparse: Sequence[bool]) -> Values:
    """Returns the fields of a model whose layers in `sparse` have the experts `moe`.

    The layers of `values` keep their own changes.
    """
    first = next((layer for layer, here in enumerate(sparse) if here), len(sparse))
    if all(sparse[first:]):
        return {"moe": replace(moe, n_dense_layers=first)}
    layers = cast("tuple[LayerChanges, ...]", values.get("layers") or ((),))
    changes = [dict(layers[place % len(layers)]) | ({} if here else {"moe": None}) for place, here in enumerate(sparse)]
    return {"moe": moe} | each_layer(changes)
