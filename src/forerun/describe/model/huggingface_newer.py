"""Reads the config.json of decoders of 2025 and 2026 that change little in an older family.

Each reader returns the fields of ModelSpec except its name. Keys and defaults follow the family's configuration class
in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import attention_bias, decoder, llama, optional, window
from forerun.describe.model.huggingface_dense import cohere2
from forerun.describe.model.huggingface_experts import deepseek, experts, in_groups, latent, mixed
from forerun.describe.model.huggingface_gemma4 import gemma4
from forerun.describe.model.huggingface_mixtures import glm4_moe, grouped, latent_experts, youtu
from forerun.describe.model.huggingface_recurrent import delta_rule
from forerun.describe.model.layer_lists import FULL, LINEAR, SLIDING, each_layer, every, layer_words
from forerun.describe.model.scan import ScanSpec
from forerun.describe.model.spec import IndexerSpec


@family("exaone", "ExaoneForCausalLM", "LlamaForCausalLM")
@family("internlm3", "InternLM3ForCausalLM", "LlamaForCausalLM", ignored=("qkv_bias", "bias"))
@family("iquestcoder", "IQuestCoderForCausalLM", "LlamaForCausalLM", ignored=("clip_qkv", "use_sliding_window"))
def alias(config: Fields) -> Values:
    """Reads EXAONE 3, InternLM 3 and IQuest-Coder: Llama under other names."""
    config.expect("qkv_bias", False)
    config.expect("use_sliding_window", False)
    return llama(config)


@family("hyperclovax", "HyperCLOVAXForCausalLM")
def hyperclovax(config: Fields) -> Values:
    """Reads HyperCLOVA X: Granite with norms after each half too where the file says so."""
    place = "both" if config.flag("use_post_norm") else "before"
    return llama(config) | {"norm_place": place}


@family("cwm", "CwmForCausalLM")
def cwm(config: Fields) -> Values:
    """Reads the Code World Model: Llama with three layers with a window to one without."""
    layers = config.integer("num_hidden_layers")
    words = [FULL if layer % 4 == 0 else SLIDING for layer in range(layers)]
    return decoder(config) | attention_bias(config) | window(config, config.integer("sliding_window", 8192), words)


@family("granite_swa", "GraniteSWAForCausalLM", ignored=("layer_rope_theta",))
def granite_swa(config: Fields) -> Values:
    """Reads Granite with a window in three of four layers, and sinks."""
    layers = config.integer("num_hidden_layers")
    words = [FULL if layer % 4 == 0 else SLIDING for layer in range(layers)]
    values = decoder(config) | attention_bias(config) | {"mlp_bias": config.flag("mlp_bias"), "sinks": True}
    return values | window(config, config.integer("sliding_window", 128), words)


@family("apertus", "ApertusForCausalLM", ignored=("post_norm", "mlp_bias"))
def apertus(config: Fields) -> Values:
    """Reads Apertus: a feed-forward of two matrices and an activation (xIELU) with two scalars, norms on queries and
    keys."""
    config.expect("post_norm", False)
    config.expect("mlp_bias", False)
    config.expect("qk_norm", True)
    values = decoder(config, activation="xielu", gated=False) | attention_bias(config)
    return values | {"qk_norm": True, "other_parameters": 2}


@family("nanochat", "NanoChatForCausalLM", ignored=("final_logit_softcapping",))
def nanochat(config: Fields) -> Values:
    """Reads nanochat: norms without weights, on queries and keys too, and a squared ReLU."""
    values = decoder(config, activation="relu2", gated=False) | attention_bias(config)
    return values | {"norm_weight": False, "qk_norm": True, "qk_norm_over": "plain", "embedding_norm": True}


@family("jais2", "Jais2ForCausalLM")
def jais2(config: Fields) -> Values:
    """Reads Jais 2: LayerNorms, biases, a feed-forward of two matrices and a squared ReLU."""
    values = decoder(config, activation="relu2", gated=False) | attention_bias(config, default=True)
    return values | {"norm": "layernorm", "norm_bias": True, "mlp_bias": config.flag("mlp_bias", True)}


@family("minicpm3", "MiniCPM3ForCausalLM", ignored=("scale_emb", "scale_depth", "dim_model_base"))
def minicpm3(config: Fields) -> Values:
    """Reads MiniCPM 3: latent attention with a dense feed-forward."""
    config.expect("mlp_bias", False)
    return youtu(config)


@family("sarvam_mla", "SarvamMLAForCausalLM", "DeepseekV3ForCausalLM")
def sarvam_mla(config: Fields) -> Values:
    """Reads Sarvam's larger mixture: DeepSeek-V3."""
    return deepseek(config, router_bias=True)


@family("sarvam_moe", "SarvamMoEForCausalLM", "Glm4MoeForCausalLM")
def sarvam_moe(config: Fields) -> Values:
    """Reads Sarvam's smaller mixture: GLM-4.5 with norms on queries and keys."""
    return glm4_moe(config)


@family("axk1", "AXK1ForCausalLM")
def axk1(config: Fields) -> Values:
    """Reads A.X K1: DeepSeek-V3 with a norm after the experts, which counts as other parameters."""
    values = deepseek(config, router_bias=True)
    moe = grouped(config)
    sparse: Values = {"other_parameters": config.integer("hidden_size")}
    layers = config.integer("num_hidden_layers")
    return values | {"moe": moe} | each_layer([{} if n < moe.n_dense_layers else sparse for n in range(layers)])


@family("hy_v3", "HYV3ForCausalLM", ignored=("router_scaling_factor", "enable_moe_fp32_combine", "route_norm"))
def hy_v3(config: Fields) -> Values:
    """Reads Hunyuan 3: norms on queries and keys, experts behind dense first layers, a correction bias."""
    config.expect("mlp_bias", False)
    values = decoder(config) | attention_bias(config) | {"qk_norm": True}
    return values | {"moe": grouped(config, "num_shared_experts", "num_experts")}


@family("mellum", "MellumForCausalLM", ignored=("mtp_layer_types", "mtp_mlp_layer_types"))
def mellum(config: Fields) -> Values:
    """Reads Mellum: Qwen 3 MoE with windows by layer."""
    layers = config.integer("num_hidden_layers")
    count = config.first_of("num_experts", "num_local_experts")
    moe = experts(config, count, config.integer("moe_intermediate_size"))
    words = layer_words(config, "mlp_layer_types", ("dense", "sparse"), ["sparse"] * layers)
    width = optional(config, "sliding_window")
    values = decoder(config) | attention_bias(config) | {"qk_norm": True}
    values |= window(config, width, [FULL] * layers)
    return values | mixed(values, moe, [word == "sparse" for word in words])


@family("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", "MiniMaxM3ForCausalLM")
def minimax_m3(config: Fields) -> Values:
    """Reads MiniMax-M3: gated experts beside a shared one, norms on queries and keys; some layers choose blocks of
    keys, which is not read."""
    layers = config.integer("num_hidden_layers")
    words = layer_words(config, "layer_types", (FULL,), [FULL] * layers)
    sparse = layer_words(config, "mlp_layer_types", ("dense", "sparse"), ["sparse"] * layers)
    for key in ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks"):
        config.stated(key)  # without effect where all layers have full attention
    width, shared = config.integer("intermediate_size"), config.integer("shared_intermediate_size", 0, least=0)
    moe = experts(config, "num_local_experts", width, shared, router_bias=True)
    values = decoder(config, width=config.integer("dense_intermediate_size", width)) | attention_bias(config)
    return values | {"qk_norm": True} | mixed(values, moe, [word == "sparse" for word in sparse[: len(words)]])


_COHERE_ROUTING = ("expert_selection_fn", "shared_expert_combination_strategy", "prefix_dense_sliding_window_pattern")


@family("cohere2_moe", "Cohere2MoeForCausalLM", ignored=_COHERE_ROUTING)
def cohere2_moe(config: Fields) -> Values:
    """Reads Cohere's mixture: Command A with experts in place of the feed-forward, behind dense first layers."""
    layers = config.integer("num_hidden_layers")
    words = layer_words(config, "mlp_layer_types", ("dense", "sparse"), ["sparse"] * layers)
    width = config.integer("intermediate_size")
    shared = width * config.integer("num_shared_experts", 0, least=0)
    values = cohere2(config)
    values["ffn_hidden"] = config.integer("prefix_dense_intermediate_size", width)
    return values | mixed(values, experts(config, "num_experts", width, shared), [word == "sparse" for word in words])


@family("gemma4_unified_text", "Gemma4UnifiedForCausalLM")
def gemma4_unified(config: Fields) -> Values:
    """Reads Gemma 4 without inputs of each layer's own and without experts."""
    return gemma4(config) | {"layer_input": 0, "layer_input_vocab": 0}


_BAILING = ("kda_safe_gate", "kda_lower_bound", "mtp_loss_scaling_factor", "moe_renormalize", "model_max_length")


@family("bailing_hybrid", "BailingHybridForCausalLM", "BailingMoeV2_5ForCausalLM", ignored=_BAILING)
def bailing_hybrid(config: Fields) -> Values:
    """Reads Ling and Ring as hybrids: Kimi Delta Attention in all but every n-th layer, which has latent attention, and
    experts behind dense first layers. The latent attention has a gate for each head."""
    layers = config.integer("num_hidden_layers")
    period = config.integer("layer_group_size", 6)
    words = layer_words(config, "layer_types", (FULL, LINEAR), every(period, FULL, LINEAR, layers))
    heads, size = config.integer("linear_num_heads"), config.integer("linear_head_dim")
    inside, taps = heads * size, config.integer(config.first_of("linear_conv_kernel_dim", "short_conv_kernel_size"), 4)
    scan = ScanSpec(
        "gated_delta",
        heads=heads,
        key_dim=size,
        value_dim=size,
        in_width=5 * inside + heads,
        conv_channels=3 * inside,
        conv_taps=taps,
        vectors=inside + heads + size,
    )
    mla, width = latent(config), config.integer("moe_intermediate_size")
    dense = min(config.integer("first_k_dense_replace", 0, least=0), layers)
    sparse = layer_words(
        config, "mlp_layer_types", ("dense", "sparse"), ["dense"] * dense + ["sparse"] * (layers - dense)
    )
    shared = width * config.integer("num_shared_experts", 0, least=0)
    top_k = config.first_of("num_experts_per_token", "num_experts_per_tok")
    moe = experts(config, "num_experts", width, shared, router_bias=True, top_k=top_k)
    moe = in_groups(config, moe, config.first_of("num_expert_group", "n_group"))
    values = decoder(config, defaults={"head_dim": mla.v_head_dim}) | attention_bias(config)
    recurrent = {"n_heads": 0, "n_kv_heads": 0, "scan": scan}
    values |= {"head_dim": mla.v_head_dim, "mla": mla}
    values |= {"head_gate": True}
    values |= each_layer([{} if word == FULL else recurrent for word in words])
    return values | mixed(values, replace(moe, n_dense_layers=0), [word == "sparse" for word in sparse])


@family("dots3_note_text", "Dots3NoteForCausalLM", ignored=("shared_experts_intermediate_size",))
def dots3_note(config: Fields) -> Values:
    """Reads dots3-note: latent attention with an indexer, or with a window and sizes of its own, and experts behind
    dense first layers, and a gate for each head. A norm of rotated keys counts as other parameters."""
    layers = config.integer("num_hidden_layers")
    words = layer_words(config, "layer_types", ("indexed_attention", SLIDING), ["indexed_attention"] * layers)
    window_size, values = config.integer("sliding_window", 512), latent_experts(config)
    indexer = IndexerSpec(
        config.integer("index_n_heads"), config.integer("index_head_dim"), config.integer("index_topk")
    )
    stated = config.section("per_layer_config") or Fields({}, config.place)
    own = {int(name): stated.section(name) for name in stated.names() if name.isdecimal()}
    changes: list[Values] = []
    for number, word in enumerate(words):
        mla, heads = latent(config), config.integer("num_attention_heads")
        layer = own.get(number)
        if layer is not None:
            heads = layer.integer("num_attention_heads", heads)
            layer.expect("num_key_value_heads", heads)
            rank, width = (
                layer.integer("kv_lora_rank", mla.kv_lora_rank),
                layer.integer("qk_nope_head_dim", mla.qk_nope_dim),
            )
            mla = replace(mla, kv_lora_rank=rank, qk_nope_dim=width)
            layer.finish()
        change: Values = {"n_heads": heads, "n_kv_heads": heads, "mla": mla}
        change |= {"sliding_window": window_size} if word == SLIDING else {"indexer": indexer}
        changes.append(change | {"other_parameters": mla.qk_rope_dim})
    return values | {"head_gate": True} | each_layer(changes)


@family("lara_mini", "LaraMiniForCausalLM")
def lara_mini(config: Fields) -> Values:
    """Reads Lara mini: the gated delta rule, and attention with and without a window, each with many small experts."""
    layers, size = config.integer("num_hidden_layers"), config.integer("sliding_window", 512)
    words = layer_words(config, "layer_types", (FULL, SLIDING, LINEAR), every(4, FULL, LINEAR, layers))
    shared = config.integer("shared_expert_intermediate_size", 0, least=0)
    moe = experts(config, "num_experts", config.integer("moe_intermediate_size"), shared)
    kinds: dict[str, Values] = {
        FULL: {},
        SLIDING: {"sliding_window": size},
        LINEAR: {"n_heads": 0, "n_kv_heads": 0, "scan": delta_rule(config)},
    }
    values = decoder(config, tied=True, defaults={"ffn_hidden": 0}) | attention_bias(config)
    return values | {"qk_norm": True, "moe": moe} | each_layer([kinds[word] for word in words])
