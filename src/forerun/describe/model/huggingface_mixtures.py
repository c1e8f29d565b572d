"""Reads the config.json of further mixture-of-experts families. Each reader changes the fields of a dense decoder.

Each reader returns the fields of ModelSpec except its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.common.errors import at
from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import attention_bias, decoder, optional, window
from forerun.describe.model.huggingface_dense import ernie4_5, exaone4
from forerun.describe.model.huggingface_experts import deepseek, experts, in_groups, latent, mixed
from forerun.describe.model.layer_lists import CHUNKED, FULL, SLIDING, each_layer, every, layer_words
from forerun.describe.model.spec import IndexerSpec, MoESpec

_TOP_K = "num_experts_per_tok"


@family("gpt_oss", "GptOssForCausalLM")
def gpt_oss(config: Fields) -> Values:
    """Reads gpt-oss: biases everywhere, sinks, and a window in every other layer."""
    layers = config.integer("num_hidden_layers")
    values = decoder(config, needs_kv_heads=True) | attention_bias(config, default=True)
    moe = experts(config, "num_local_experts", config.integer("intermediate_size"), router_bias=True)
    windows = window(config, config.integer("sliding_window", 128), every(2, FULL, SLIDING, layers))
    return values | {"sinks": True, "mlp_bias": True, "moe": moe} | windows


@family("glm4_moe", "Glm4MoeForCausalLM")
def glm4_moe(config: Fields) -> Values:
    """Reads GLM-4.5: dense first layers, shared experts, biases on queries, keys and values."""
    norms = {"qk_norm": config.flag("use_qk_norm"), "qkv_bias": config.flag("attention_bias")}
    return decoder(config) | norms | {"moe": grouped(config)}


@family("solar_open", "SolarOpenForCausalLM")
def solar_open(config: Fields) -> Values:
    """Reads Solar Open: GLM-4.5 with experts in every layer unless the file says otherwise."""
    bias = {"qkv_bias": config.flag("attention_bias")}
    return decoder(config, defaults={"ffn_hidden": 0}) | bias | {"moe": grouped(config)}


@family("dots1", "Dots1ForCausalLM")
def dots1(config: Fields) -> Values:
    """Reads dots.llm1: GLM-4.5 with norms on queries and keys."""
    config.stated("max_window_layers")
    windows = window(config, optional(config, "sliding_window"), [FULL] * config.integer("num_hidden_layers"))
    return decoder(config) | attention_bias(config) | windows | {"qk_norm": True, "moe": grouped(config)}


def grouped(config: Fields, shared: str = "n_shared_experts", count: str = "n_routed_experts") -> MoESpec:
    """Reads experts as DeepSeek-V3 has them: dense first layers, shared experts, a correction bias."""
    width = config.integer("moe_intermediate_size")
    dense = _first_dense(config)
    moe = experts(config, count, width, width * config.integer(shared, 0, least=0), dense, router_bias=True)
    return in_groups(config, moe)


def _first_dense(config: Fields) -> int:
    """Returns how many of the first layers are dense: `first_k_dense_replace`, `mlp_layer_types` in newer files, or
    `moe_layer_freq` as a number for each layer."""
    layers = config.integer("num_hidden_layers")
    dense = min(config.integer("first_k_dense_replace", 0, least=0), layers)
    if config.is_list("moe_layer_freq"):
        words = ["sparse" if one else "dense" for one in config.items("moe_layer_freq")]
    elif config.stated("mlp_layer_types"):
        words = layer_words(config, "mlp_layer_types", ("dense", "sparse"), ())
    else:
        return dense
    first = words.index("sparse") if "sparse" in words else layers
    if "dense" in words[first:]:
        key = "moe_layer_freq" if config.is_list("moe_layer_freq") else "mlp_layer_types"
        raise config.error(key, "has dense layers behind sparse ones, which is not supported")
    return first


@family("mimo_v2_flash", "MiMoV2FlashForCausalLM")
def mimo_v2_flash(config: Fields) -> Values:
    """Reads MiMo-V2-Flash: values narrower than keys; layers with a window have more key heads, and sinks.

    Files on the hub have a number for each layer in place of words, and keys of their own for layers with a window.
    """
    values = decoder(config, needs_kv_heads=True) | {
        "v_head_dim": config.integer("v_head_dim"),
        "moe": grouped(config),
    }
    values |= {"qkv_bias": config.flag("attention_bias")}
    layers, kv_heads = config.integer("num_hidden_layers"), config.integer("num_key_value_heads")
    for key, same in (
        ("swa_num_attention_heads", "n_heads"),
        ("swa_head_dim", "head_dim"),
        ("swa_v_head_dim", "v_head_dim"),
    ):
        config.expect(key, values[same])
    config.expect("add_full_attention_sink_bias", False)
    usual = [FULL, *every(6, FULL, SLIDING, layers)[1:]]
    if config.stated("hybrid_layer_pattern"):
        usual = [SLIDING if slides else FULL for slides in config.items("hybrid_layer_pattern")]
    width = config.integer("sliding_window", 129)
    if config.stated("sliding_window_size"):
        width = config.integer("sliding_window_size") + 1
    sliding: Values = {
        "sliding_window": width,
        "n_kv_heads": config.integer("swa_num_key_value_heads", 2 * kv_heads),
        "sinks": config.flag("add_swa_attention_sink_bias", True),
    }
    kinds: dict[str, Values] = {FULL: {"n_kv_heads": kv_heads}, SLIDING: sliding}
    return values | each_layer([kinds[word] for word in layer_words(config, "layer_types", (FULL, SLIDING), usual)])


@family("deepseek_v32", "DeepseekV32ForCausalLM")
@family("glm_moe_dsa", "GlmMoeDsaForCausalLM")
def deepseek_v32(config: Fields) -> Values:
    """Reads DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer that chooses the keys of a query."""
    return latent_experts(config) | each_layer(indexed(config))


def indexed(config: Fields, default: Sequence[str] = ()) -> list[Values]:
    """Reads the indexer of each layer: its own, or the choice of keys of the last layer that has one.

    `default` are the family's words for `indexer_types`, all "full" unless given.
    """
    indexer = IndexerSpec(
        config.integer("index_n_heads"), config.integer("index_head_dim"), config.integer("index_topk")
    )
    layers = config.integer("num_hidden_layers")
    layer_words(config, "layer_types", ("indexed_attention", FULL), ["indexed_attention"] * layers)
    words = layer_words(config, "indexer_types", ("full", "shared"), default or ["full"] * layers)
    return [{"indexer": replace(indexer, shared=word == "shared")} for word in words]


@family("glm4_moe_lite", "Glm4MoeLiteForCausalLM")
def latent_experts(config: Fields) -> Values:
    """Reads GLM-4.7 Flash: DeepSeek-V3's layers."""
    config.stated("head_dim")
    values = deepseek(config, router_bias=True)
    return values | {"moe": grouped(config)}


@family("youtu", "YoutuForCausalLM")
def youtu(config: Fields) -> Values:
    """Reads Youtu-LLM: latent attention with a dense feed-forward."""
    mla = latent(config)
    values = decoder(config, tied=True, defaults={"head_dim": mla.v_head_dim})
    return values | attention_bias(config) | {"head_dim": mla.v_head_dim, "mla": mla}


@family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM")
def ernie4_5_moe(config: Fields) -> Values:
    """Reads ERNIE 4.5 with experts from `moe_layer_start_index` to `moe_layer_end_index`."""
    width, layers = config.integer("moe_intermediate_size"), config.integer("num_hidden_layers")
    shared = width * config.integer("moe_num_shared_experts", 0, least=0)
    moe = experts(config, "moe_num_experts", width, shared, router_bias=True, top_k="moe_k")
    first, step = config.integer("moe_layer_start_index", 1, least=0), config.integer("moe_layer_interval", 1)
    last = config.integer("moe_layer_end_index", -1, least=-1) % layers
    values = ernie4_5(config)
    return values | mixed(values, moe, [first <= n <= last and (n + 1) % step == 0 for n in range(layers)])


@family("dbrx", "DbrxForCausalLM")
def dbrx(config: Fields) -> Values:
    """Reads DBRX: LayerNorms without bias, experts in every layer."""
    attention = config.section("attn_config") or Fields({}, config.place)
    inside = config.section("ffn_config") or Fields({}, config.place)
    hidden, n_heads = config.integer("d_model"), config.integer("n_heads")
    width = inside.integer("ffn_hidden_size")
    with at(config.place):
        moe = MoESpec(inside.integer("moe_num_experts"), inside.integer("moe_top_k"), width)
    return {
        "n_layers": config.integer("n_layers"),
        "hidden": hidden,
        "n_heads": n_heads,
        "n_kv_heads": attention.integer("kv_n_heads", 1),
        "head_dim": hidden // n_heads,
        "ffn_hidden": width,
        "vocab": config.integer("vocab_size"),
        "norm": "layernorm",
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "moe": moe,
    }


@family("granitemoe", "GraniteMoeForCausalLM")
@family("granitemoeshared", "GraniteMoeSharedForCausalLM")
def granitemoe(config: Fields) -> Values:
    """Reads Granite with experts, and a shared one where the file has its width."""
    config.expect("position_embedding_type", "rope")
    shared = config.integer("shared_intermediate_size", 0, least=0)
    moe = experts(config, "num_local_experts", config.integer("intermediate_size"), shared)
    return decoder(config) | attention_bias(config) | {"moe": moe}


@family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM")
def hunyuan_moe(config: Fields) -> Values:
    """Reads Hunyuan with experts: norms on queries and keys, one shared expert as wide as the others."""
    width = config.integer("intermediate_size")
    chosen = config.items("moe_topk")[0] if config.is_list("moe_topk") else config.integer("moe_topk", 1)
    config.stated("moe_topk")
    with at(config.place):
        moe = MoESpec(config.integer("num_experts"), int(str(chosen)), width, width)
    return decoder(config, tied=True) | attention_bias(config) | {"qk_norm": True, "moe": moe}


@family("phimoe", "PhimoeForCausalLM")
def phimoe(config: Fields) -> Values:
    """Reads Phi-3.5-MoE: LayerNorms, experts in every layer, biases on attention and head."""
    moe = experts(config, "num_local_experts", config.integer("intermediate_size"))
    values = decoder(config) | attention_bias(config) | window(config, optional(config, "sliding_window"))
    head = {"head_bias": config.flag("lm_head_bias")}
    return values | head | {"norm": "layernorm", "norm_bias": True, "moe": moe}


@family("olmoe", "OlmoeForCausalLM")
def olmoe(config: Fields) -> Values:
    """Reads OLMoE: norms on all queries and all keys."""
    moe = experts(config, config.first_of("num_experts", "num_local_experts"), config.integer("intermediate_size"))
    return decoder(config) | attention_bias(config) | {"qk_norm": True, "qk_norm_over": "all_heads", "moe": moe}


@family("flex_olmo", "FlexOlmoForCausalLM")
def flex_olmo(config: Fields) -> Values:
    """Reads FlexOlmo: OLMoE with norms after each half."""
    return olmoe(config) | {"norm_place": "after"}


@family("minimax_m2", "MiniMaxM2ForCausalLM")
def minimax_m2(config: Fields) -> Values:
    """Reads MiniMax-M2: norms on all queries and all keys, a correction bias for each expert."""
    moe = experts(config, "num_local_experts", config.integer("intermediate_size"), router_bias=True)
    return decoder(config) | {"qk_norm": True, "qk_norm_over": "all_heads", "moe": moe}


@family("exaone_moe", "ExaoneMoeForCausalLM")
def exaone_moe(config: Fields) -> Values:
    """Reads K-EXAONE: EXAONE 4's attention with norms before each half, and experts behind dense first layers."""
    moe = grouped(config, "num_shared_experts", "num_experts")
    return exaone4(config) | {"norm_place": "before", "moe": moe}


@family("afmoe", "AfmoeForCausalLM")
def afmoe(config: Fields) -> Values:
    """Reads Arcee's Trinity: gated attention with norms around each half; layers without a window have no positions."""
    layers, width = config.integer("num_hidden_layers"), config.integer("moe_intermediate_size")
    shared = width * config.integer("num_shared_experts", 0, least=0)
    dense = config.integer("num_dense_layers", 1, least=0)
    moe = experts(config, "num_experts", width, shared, dense, router_bias=True)
    period = config.integer("global_attn_every_n_layers", 4)
    words = layer_words(config, "layer_types", (FULL, SLIDING), every(period, FULL, SLIDING, layers))
    sliding = config.integer("sliding_window")
    changes = [
        {"sliding_window": sliding, "position": "rope"} if word == SLIDING else {"position": "none"} for word in words
    ]
    norms = {"qk_norm": True, "norm_place": "both", "attention_gate": True}
    return decoder(config) | attention_bias(config) | norms | {"moe": moe} | each_layer(changes)


@family("llama4_text", "Llama4ForCausalLM")
def llama4(config: Fields) -> Values:
    """Reads Llama 4: chunked attention with rotary positions in three of four layers, experts in every n-th layer."""
    layers, width = config.integer("num_hidden_layers"), config.integer("intermediate_size")
    rotary = config.items("no_rope_layers") or every(config.integer("no_rope_layer_interval", 4), "", "rope", layers)
    default = [CHUNKED if turns else FULL for turns in rotary]
    words = layer_words(config, "layer_types", (FULL, CHUNKED), default)
    config.stated("no_rope_layer_interval")
    chunk, norms = config.integer("attention_chunk_size", 8192), config.flag("use_qk_norm", True)
    changes = [
        {
            "attention_chunk": chunk if word == CHUNKED else None,
            "position": "rope" if turns else "none",
            "qk_norm": norms and bool(turns),
        }
        for word, turns in zip(words, rotary, strict=True)
    ]
    dense_width = config.integer("intermediate_size_mlp", 16384)
    values = decoder(config) | {"ffn_hidden": dense_width, "qk_norm_over": "plain"}
    values |= attention_bias(config) | each_layer(changes)
    step = config.integer("interleave_moe_layer_step", 1)
    stated = config.items("moe_layers")
    sparse = [layer in stated if stated else (layer + 1) % step == 0 for layer in range(layers)]
    return values | mixed(values, experts(config, "num_local_experts", width, width), sparse)
