"""Reads the config.json of the mixture-of-experts families: Mixtral, Qwen MoE, DeepSeek.

Each reader returns the fields of ModelSpec except its name. Readers ignore keys of routing that change which experts a
token takes, but neither their number nor their size.
"""

from __future__ import annotations

from forerun.common.errors import at
from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import decoder, qwen_window, window
from forerun.describe.model.spec import MLASpec, MoESpec


@family("mixtral", "MixtralForCausalLM")
def mixtral(config: Fields) -> Values:
    """Reads Mixtral: every layer has experts of width `intermediate_size`."""
    values = decoder(config, needs_kv_heads=True)
    moe = _moe(config, "num_local_experts", config.integer("intermediate_size"))
    width = config.integer("sliding_window") if config.stated("sliding_window") else None
    return values | {"moe": moe, "sliding_window": window(config, width)}


@family("qwen2_moe", "Qwen2MoeForCausalLM")
def qwen2_moe(config: Fields) -> Values:
    """Reads Qwen 1.5 and 2 MoE: one gated shared expert, biases on queries, keys and values."""
    values = decoder(config, needs_kv_heads=True) | {"sliding_window": qwen_window(config)}
    shared = config.integer("shared_expert_intermediate_size")
    moe = _moe(config, "num_experts", config.integer("moe_intermediate_size"), shared, _dense_layers(config), gate=True)
    return values | {"qkv_bias": config.flag("qkv_bias", True), "moe": moe}


@family("qwen3_moe", "Qwen3MoeForCausalLM")
def qwen3_moe(config: Fields) -> Values:
    """Reads Qwen 3 MoE: no shared expert, norms on queries and keys."""
    bias = config.flag("attention_bias")
    values = decoder(config, needs_kv_heads=True) | {"sliding_window": qwen_window(config)}
    moe = _moe(config, "num_experts", config.integer("moe_intermediate_size"), dense_layers=_dense_layers(config))
    return values | {"qk_norm": True, "qkv_bias": bias, "out_bias": bias, "moe": moe}


@family("deepseek_v2", "DeepseekV2ForCausalLM")
def deepseek_v2(config: Fields) -> Values:
    """Reads DeepSeek-V2: latent attention, routed and shared experts."""
    if config.stated("topk_method"):
        config.text("topk_method", choices=("greedy", "group_limited_greedy", "noaux_tc"))
        return _deepseek(config, router_bias=config.text("topk_method") == "noaux_tc")
    return _deepseek(config, router_bias=False)


@family("deepseek_v3", "DeepseekV3ForCausalLM")
def deepseek_v3(config: Fields) -> Values:
    """Reads DeepSeek-V3: V2 with a correction bias for each expert that balances the load (arXiv 2412.19437, 2.1.2)."""
    config.expect("topk_method", "noaux_tc")
    return _deepseek(config, router_bias=True)


def _deepseek(config: Fields, router_bias: bool) -> Values:
    bias = config.flag("attention_bias")
    config.expect("hidden_act", "silu")
    config.expect("mlp_bias", False)
    config.expect("moe_layer_freq", 1)
    n_heads = config.integer("num_attention_heads")
    config.expect("num_key_value_heads", n_heads)
    mla = _latent(config)
    moe = None
    if config.stated("n_routed_experts"):
        width = config.integer("moe_intermediate_size")
        shared = width * config.integer("n_shared_experts", 0, least=0)
        dense = min(config.integer("first_k_dense_replace", 0, least=0), config.integer("num_hidden_layers"))
        moe = _moe(config, "n_routed_experts", width, shared, dense, router_bias=router_bias)
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
        "sliding_window": window(config, None),
        "mla": mla,
        "moe": moe,
    }


def _latent(config: Fields) -> MLASpec:
    return MLASpec(
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_dim=config.integer("qk_nope_head_dim"),
        qk_rope_dim=config.integer("qk_rope_head_dim"),
        v_head_dim=config.integer("v_head_dim"),
        q_lora_rank=config.integer("q_lora_rank") if config.stated("q_lora_rank") else None,
    )


def _moe(
    config: Fields,
    count_key: str,
    width: int,
    shared_width: int = 0,
    dense_layers: int = 0,
    gate: bool = False,
    router_bias: bool = False,
) -> MoESpec:
    n_experts, top_k = config.integer(count_key), config.integer("num_experts_per_tok")
    with at(config.place):
        return MoESpec(n_experts, top_k, width, shared_width, dense_layers, gate, router_bias)


def _dense_layers(config: Fields) -> int:
    """Returns how many of the first layers Qwen's `mlp_only_layers` keeps dense."""
    config.expect("decoder_sparse_step", 1)
    dense = config.items("mlp_only_layers")
    if dense != list(range(len(dense))):
        raise config.error("mlp_only_layers", f"{dense} is not supported, only the first layers in order")
    return len(dense)
