"""Reads the config.json of families whose code lies beside their weights on the hub (`trust_remote_code`).

Hugging Face transformers does not build them. Each reader returns the fields of ModelSpec except its name. Keys and
defaults follow the family's own configuration class.
"""

from __future__ import annotations

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import attention_bias, decoder, llama, qwen_window
from forerun.describe.model.huggingface_experts import experts, in_groups
from forerun.describe.model.huggingface_gpt import stack
from forerun.describe.model.huggingface_mixtures import hunyuan_moe
from forerun.describe.model.huggingface_recurrent import lightning
from forerun.describe.model.layer_lists import FULL, LINEAR, each_layer
from forerun.describe.model.spec_file import even_head_dim

_ALIBI_HIDDEN = 5120
"""hidden size of Baichuan's 13B models, whose attention has ALiBi; the 7B ones have rotary positions"""
_BAICHUAN = ("model_max_length", "z_loss_weight")


@family("Yi", "YiForCausalLM")
@family("xverse", "XverseForCausalLM", ignored=("max_tokenizer_truncation",))
@family("aquila", "AquilaForCausalLM", "AquilaModel")
@family("skywork", "SkyworkForCausalLM")
@family("solar", "SolarForCausalLM", ignored=("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4", "bskcn_tv"))
def as_llama(config: Fields) -> Values:
    """Reads Yi, XVERSE, Aquila, Skywork and Solar Pro: Llama under other names."""
    return llama(config)


@family("mimo", "MiMoForCausalLM")
def mimo(config: Fields) -> Values:
    """Reads MiMo: Qwen 2 under another name."""
    return (
        decoder(config, needs_kv_heads=True) | {"qkv_bias": config.flag("attention_bias", True)} | qwen_window(config)
    )


@family("internlm", "InternLMForCausalLM", ignored=("rotary",))
@family("internlm2", "InternLM2ForCausalLM", ignored=("rotary",))
def internlm(config: Fields) -> Values:
    """Reads InternLM 1 and 2: Llama with biases in the attention where `bias` says so."""
    return decoder(config) | attention_bias(config, "bias", default=True)


@family("baichuan", "BaichuanForCausalLM", "BaiChuanForCausalLM", ignored=_BAICHUAN)
def baichuan(config: Fields) -> Values:
    """Reads Baichuan 1 and 2: Llama, whose larger sizes have ALiBi."""
    is_large = config.integer("hidden_size") == _ALIBI_HIDDEN
    return decoder(config) | {"position": "alibi" if is_large else "rope"}


@family("orion", "OrionForCausalLM")
def orion(config: Fields) -> Values:
    """Reads Orion: Llama with LayerNorms."""
    return llama(config) | {"norm": "layernorm", "norm_bias": True}


_MINICPM = ("scale_emb", "scale_depth", "dim_model_base", "mup_denominator", "sparse_config")


@family("minicpm", "MiniCPMForCausalLM", ignored=_MINICPM)
def minicpm(config: Fields) -> Values:
    """Reads MiniCPM 1, 2 and 4: Llama with a tied embedding, and experts where the file has some."""
    config.expect("sparse_config", None)
    values = decoder(config, tied=True) | attention_bias(config)
    if config.integer("num_experts", 0, least=0):
        values["moe"] = experts(config, "num_experts", config.integer("intermediate_size"))
    return values


_QWEN = (
    *("bf16", "fp16", "fp32", "use_flash_attn", "use_dynamic_ntk", "use_logn_attn"),
    *("use_cache_quantization", "use_cache_kernel", "softmax_in_fp32", "onnx_safe", "seq_length", "scale_attn_weights"),
)


@family("qwen", "QWenLMHeadModel", ignored=_QWEN)
def qwen(config: Fields) -> Values:
    """Reads the first Qwen: biases on queries, keys and values alone. Its `intermediate_size` counts both of the two
    first matrices of a feed-forward."""
    hidden, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("kv_channels", even_head_dim(config, hidden, n_heads))
    out_bias = not config.flag("no_bias", True)
    values = decoder(config, width=config.integer("intermediate_size") // 2)
    return values | {"head_dim": head_dim, "qkv_bias": True, "out_bias": out_bias, "mlp_bias": out_bias}


_CHATGLM = (
    *("apply_query_key_layer_scaling", "attention_softmax_in_fp32"),
    *("bias_dropout_fusion", "classifier_dropout", "fp32_residual_connection", "interleaved_qkv", "original_rope"),
    *("prefix_projection", "pre_seq_len", "quantization_bit", "rope_ratio", "seq_length", "vocab_size"),
)


@family("chatglm", "ChatGLMModel", "ChatGLMForConditionalGeneration", "ChatGLMForCausalLM", ignored=_CHATGLM)
def chatglm(config: Fields) -> Values:
    """Reads ChatGLM 2 and 3, and GLM-4 of 2024: few key heads, biases on queries, keys and values."""
    config.expect("rmsnorm", True)
    config.expect("post_layer_norm", True)
    config.expect("apply_residual_connection_post_layernorm", False)
    hidden, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    groups = config.integer("multi_query_group_num", 1) if config.flag("multi_query_attention") else n_heads
    bias = config.flag("add_bias_linear")
    return {
        "n_layers": config.integer("num_layers"),
        "hidden": hidden,
        "n_heads": n_heads,
        "n_kv_heads": groups,
        "head_dim": config.integer("kv_channels", even_head_dim(config, hidden, n_heads)),
        "ffn_hidden": config.integer("ffn_hidden_size"),
        "vocab": config.integer("padded_vocab_size"),
        "mlp": "swiglu",
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "qkv_bias": config.flag("add_qkv_bias") or bias,
        "out_bias": bias,
        "mlp_bias": bias,
    }


@family("telechat", "TELECHAT", "TeleChatForCausalLM", "TeleChat2ForCausalLM", "TELECHAT2")
def telechat(config: Fields) -> Values:
    """Reads TeleChat 1 and 2: Llama with biases behind the attention and behind the feed-forward. The bias of the
    latter counts as other parameters."""
    hidden, n_heads = config.integer("hidden_size"), config.integer(config.first_of("n_head", "num_attention_heads"))
    return {
        "n_layers": config.integer(config.first_of("n_layer", "num_hidden_layers")),
        "hidden": hidden,
        "n_heads": n_heads,
        "n_kv_heads": config.integer("num_key_value_heads", n_heads),
        "head_dim": even_head_dim(config, hidden, n_heads),
        "ffn_hidden": config.integer(config.first_of("ffn_hidden_size", "intermediate_size")),
        "vocab": config.integer("vocab_size"),
        "mlp": "swiglu",
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "embedding_norm": config.flag("embed_layernorm"),
        "out_bias": True,
        "other_parameters": hidden,
    }


_JAIS = ("alibi_scaling", "mup_embeddings_scale", "mup_output_alpha", "mup_scale_qk_dot_by_d", "mup_width_scale")
_JAIS_ATTENTION = ("embeddings_scale", "output_logits_scale", "scale_attn_weights", "scale_qk_dot_by_d", "width_scale")


@family("jais", "JAISLMHeadModel", ignored=(*_JAIS, *_JAIS_ATTENTION, "scale_attn_by_inverse_layer_idx", "n_positions"))
def jais(config: Fields) -> Values:
    """Reads the first Jais: GPT-2 with ALiBi and a gated feed-forward."""
    config.expect("activation_function", "swiglu")
    config.expect("position_embedding_type", "alibi")
    config.expect("scale_attn_by_inverse_layer_idx", False)
    hidden = config.integer("n_embd")
    n_inner = config.integer("n_inner", 4 * hidden)
    return stack(
        config,
        hidden,
        config.integer("n_head"),
        n_layers=config.integer("n_layer"),
        ffn_hidden=n_inner,
        mlp="swiglu",
        position="alibi",
    )


@family("openelm", "OpenELMForCausalLM", ignored=("max_context_length", "rope_freq_constant", "rope_max_length"))
def openelm(config: Fields) -> Values:
    """Reads OpenELM, whose layers grow: each has its own number of heads and its own feed-forward."""
    config.expect("ffn_with_glu", True)
    config.expect("normalization_layer_name", "rms_norm")
    config.expect("activation_fn_name", "swish")
    layers, hidden = config.integer("num_transformer_layers"), config.integer("model_dim")
    divisor, head_dim = config.integer("ffn_dim_divisor", 256), config.integer("head_dim")
    for key in ("num_gqa_groups", "qkv_multipliers"):
        config.stated(key)  # the numbers of heads follow from them, and the file states these too
    shape = {key: _of_each(config, key, layers) for key in ("ffn_multipliers", "num_query_heads", "num_kv_heads")}
    changes: list[Values] = [
        {
            "ffn_hidden": _divisible(times * hidden, divisor),
            "n_heads": round(heads),
            "n_kv_heads": round(kv_heads),
        }
        for times, heads, kv_heads in zip(*shape.values(), strict=True)
    ]
    return {
        "n_layers": layers,
        "hidden": hidden,
        "head_dim": head_dim,
        "vocab": config.integer("vocab_size"),
        "mlp": "swiglu",
        "tied_embeddings": config.flag("share_input_output_layers", True),
        "qk_norm": config.flag("normalize_qk_projections"),
        **changes[0],
        **each_layer(changes),
    }


def _of_each(config: Fields, key: str, layers: int) -> list[float]:
    """Reads a list with one number for each layer."""
    values = config.items(key)
    if len(values) != layers:
        raise config.error(key, f"has {len(values)} entries for {layers} layers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise config.error(key, "must hold positive numbers alone")
    return [float(str(value)) for value in values]


def _divisible(size: float, divisor: int) -> int:
    """Returns the multiple of `divisor` nearest to `size`, but no less than nine tenths of it."""
    nearest = max(divisor, int(size + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * size else nearest


_DECI = ("num_key_value_heads", "intermediate_size")


@family("nemotron-nas", "DeciLMForCausalLM", ignored=_DECI)
@family("deci", "DeciLMForCausalLM", ignored=_DECI)
def deci(config: Fields) -> Values:
    """Reads models that a search made of Llama (Nemotron Super and Ultra): each layer has its own number of key heads
    and its own feed-forward, or lacks one of them."""
    n_heads, layers = config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    blocks = config.items("block_configs")
    if len(blocks) != layers:
        raise config.error("block_configs", f"has {len(blocks)} entries for {layers} layers")
    changes = [_deci_layer(config, block, number, n_heads) for number, block in enumerate(blocks)]
    full = [change for change in changes if change["n_heads"] and change["ffn_hidden"]]
    whole = full[0] if full else changes[0]
    values = decoder(config, width=1, defaults={"n_kv_heads": n_heads}) | attention_bias(config)
    return values | {"mlp_bias": config.flag("mlp_bias")} | whole | each_layer(changes)


def _deci_layer(config: Fields, block: object, number: int, n_heads: int) -> Values:
    """Returns the attention and the feed-forward of layer `number`; either may be missing."""
    here = Fields(block if isinstance(block, dict) else {}, f"{config.place}, in block_configs {number}")
    attention, feed_forward = here.section("attention"), here.section("ffn")
    if attention is None or feed_forward is None:
        raise here.error("attention and ffn", "must both be there")
    for half in (attention, feed_forward):
        half.expect("replace_with_linear", False)
    out: Values = {"n_heads": 0, "n_kv_heads": 0, "ffn_hidden": 0}
    if not attention.flag("no_op"):
        out |= {"n_heads": n_heads, "n_kv_heads": n_heads // attention.integer("n_heads_in_group", most=n_heads)}
    if not feed_forward.flag("no_op"):
        out["ffn_hidden"] = _deci_width(feed_forward, config.integer("hidden_size"))
    return out


def _deci_width(feed_forward: Fields, hidden: int) -> int:
    """Returns the width of a feed-forward, stated or as a multiple of two thirds of `hidden`, rounded up to 256."""
    times = feed_forward.number("ffn_mult")
    if times is None:
        return feed_forward.integer("intermediate_size")
    return -(-int(2 * times * hidden / 3) // 256) * 256


_DEEPSEEK = ("aux_loss_alpha",)


@family("deepseek", "DeepseekForCausalLM", ignored=_DEEPSEEK)
def deepseek_moe(config: Fields) -> Values:
    """Reads the first DeepSeek with experts: Llama with many small experts behind dense first layers."""
    config.expect("moe_layer_freq", 1)
    width, layers = config.integer("moe_intermediate_size"), config.integer("num_hidden_layers")
    shared = width * config.integer("n_shared_experts", 0, least=0)
    dense = min(config.integer("first_k_dense_replace", 0, least=0), layers)
    return decoder(config) | attention_bias(config) | {"moe": experts(config, "n_routed_experts", width, shared, dense)}


_BAILING = (
    *("moe_router_topk_scaling_factor", "mtp_loss_scaling_factor", "multi_gate", "norm_head", "norm_softmax"),
    *("num_logits_per_token", "output_dropout", "rotary_type", "routed_scaling_factor", "router_dtype", "router_type"),
    *("score_function", "using_split_qkv_in_self_attention"),
)


@family("bailing_moe", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", ignored=_BAILING)
@family("bailing_moe_v2", "BailingMoeV2ForCausalLM", ignored=_BAILING)
def bailing_moe(config: Fields) -> Values:
    """Reads Ling and Ring 1 and 2: experts beside shared ones behind dense first layers, norms on queries and keys in
    the second generation."""
    config.expect("use_rmsnorm", True)
    bias = config.flag("use_bias")
    width, layers = config.integer("moe_intermediate_size"), config.integer("num_hidden_layers")
    shared = config.integer("moe_shared_expert_intermediate_size", width)
    shared *= config.integer("num_shared_experts", 0, least=0)
    dense = min(config.integer("first_k_dense_replace", 0, least=0), layers)
    corrected = config.flag("moe_router_enable_expert_bias")
    moe = in_groups(config, experts(config, "num_experts", width, shared, dense, router_bias=corrected))
    biases = {"qkv_bias": bias or config.flag("use_qkv_bias"), "out_bias": bias, "mlp_bias": bias}
    return decoder(config) | biases | {"qk_norm": config.flag("use_qk_norm"), "moe": moe}


@family("grok-1", "Grok1ModelForCausalLM", "Grok1ForCausalLM", ignored=("max_attn_value", "num_layers"))
def grok(config: Fields) -> Values:
    """Reads Grok-1: norms around each half, and eight experts with a gated GELU."""
    values = decoder(config, activation="gelu", tied=True) | {"norm_place": "both"}
    chosen = config.first_of("num_selected_experts", "num_experts_per_tok")
    moe = experts(
        config, config.first_of("num_experts", "num_local_experts"), int(str(values["ffn_hidden"])), top_k=chosen
    )
    return values | {"moe": moe}


_MINIMAX = (
    *("layernorm_full_attention_alpha", "layernorm_full_attention_beta", "layernorm_linear_attention_alpha"),
    *("layernorm_linear_attention_beta", "layernorm_mlp_alpha", "layernorm_mlp_beta", "postnorm", "shared_moe_mode"),
)


@family("minimax_text_01", "MiniMaxText01ForCausalLM", ignored=_MINIMAX)
@family("minimax_m1", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", ignored=_MINIMAX)
def minimax_m1(config: Fields) -> Values:
    """Reads MiniMax-Text-01 and M1, whose files have a number for each layer: 1 for full attention."""
    config.expect("shared_intermediate_size", 0)
    numbers = config.items("attn_type_list")
    if any(number not in (0, 1) for number in numbers):
        raise config.error("attn_type_list", "must hold the numbers 0 and 1 alone")
    return lightning(config, [FULL if number else LINEAR for number in numbers])


_HUNYUAN = ("attention_head_dim", "cla_share_factor", "num_media_embeds", "use_mixed_mlp_moe", "use_qk_norm")


@family("hunyuan", "HunYuanMoEV1ForCausalLM", "HunYuanForCausalLM", ignored=_HUNYUAN)
def hunyuan_large(config: Fields) -> Values:
    """Reads Hunyuan-Large: every other layer reads the keys and values of the layer before."""
    values = hunyuan_moe(config)
    config.expect("num_shared_expert", 1)
    if not config.flag("use_cla"):
        return values
    share, layers = config.integer("cla_share_factor", 2), config.integer("num_hidden_layers")
    return values | each_layer([{"shared_kv": layer % share > 0} for layer in range(layers)])
