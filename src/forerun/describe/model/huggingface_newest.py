"""Reads the config.json of decoders of 2026 with parts of their own: gated norms, gates for each head, pairs of heads.

Each reader returns the fields of ModelSpec except its name. Keys and defaults follow the family's configuration class
in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import attention_bias, decoder
from forerun.describe.model.huggingface_experts import experts
from forerun.describe.model.huggingface_mixtures import indexed, latent_experts
from forerun.describe.model.huggingface_recurrent import short_convolutions
from forerun.describe.model.layer_lists import FULL, SLIDING, each_layer, layer_words
from forerun.describe.model.spec import MLASpec


@family("diffllama", "DiffLlamaForCausalLM", ignored=("lambda_std_dev",))
def diffllama(config: Fields) -> Values:
    """Reads DiffLlama: Llama whose heads are subtracted from each other in pairs (arXiv 2410.05258)."""
    return decoder(config) | attention_bias(config) | {"differential": True}


@family("axk2", "AXK2ForCausalLM")
def axk2(config: Fields) -> Values:
    """Reads A.X K2: DeepSeek-V3.2 with gates on norms, and on the attention's output together with the queries."""
    values = latent_experts(config)
    mla = values["mla"]
    assert isinstance(mla, MLASpec)
    gates = {"attention_gate": True, "norm_gate_rank": config.integer("gated_norm_rank", 16)}
    return values | {"mla": replace(mla, gated_query=True)} | gates | each_layer(indexed(config))


_CLASSIFIER = ("initializer_cutoff_factor", "mlp_dropout", "local_rope_theta", "global_rope_theta", "sliding_window")


_ENCODER = (
    *_CLASSIFIER,
    *("classifier_pooling", "sparse_pred_ignore_index", "sparse_prediction", "reference_compile"),
    *(
        "repad_logits_with_grad",
        "deterministic_flash_attn",
        "embedding_dropout",
        "mlp_dropout",
        "position_embedding_type",
    ),
)


@family("modernbert-decoder", "ModernBertDecoderForCausalLM", ignored=_CLASSIFIER)
def modernbert_decoder(config: Fields) -> Values:
    """Reads ModernBERT's decoder: windows by layer, a gated feed-forward, and a dense layer before the head.

    A norm behind the embedding takes the place of that before the first attention, which costs the same.
    """
    layers, period = config.integer("num_hidden_layers"), config.integer("global_attn_every_n_layers", 3)
    usual = [SLIDING if layer % period else FULL for layer in range(layers)]
    words = layer_words(config, "layer_types", (FULL, SLIDING), usual)
    window = max(1, config.integer("local_attention", 128) // 2)
    config.expect("hidden_activation", "gelu", "gelu_pytorch_tanh")
    config.expect("classifier_activation", "gelu", "silu", "relu")
    return (
        decoder(config, tied=True, activation="gelu")
        | attention_bias(config)
        | {
            "mlp_bias": config.flag("mlp_bias"),
            "norm": "layernorm",
            "norm_bias": config.flag("norm_bias"),
            "head_transform": True,
            "head_transform_bias": config.flag("classifier_bias"),
            "head_bias": config.flag("decoder_bias", True),
        }
        | each_layer([{"sliding_window": window if word == SLIDING else None} for word in words])
    )


@family("modernbert", "ModernBertForMaskedLM", "ModernBertModel", ignored=_ENCODER)
def modernbert(config: Fields) -> Values:
    """Reads ModernBERT: its decoder without a causal mask, so that a window reaches to both sides."""
    return modernbert_decoder(config) | {"causal": False}


@family("lfm3", "Lfm3ForCausalLM")
def lfm3(config: Fields) -> Values:
    """Reads LFM3: gated short convolutions, with attention with and without a window in between, norms around each
    half, and a gate for each head."""
    hidden, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    usual = [FULL if layer % 4 == 2 else SLIDING if layer % 4 == 0 and layer else "conv" for layer in range(layers)]
    words = layer_words(config, "layer_types", (FULL, SLIDING, "conv"), usual)
    kinds: dict[str, Values] = {
        FULL: {},
        SLIDING: {"sliding_window": config.integer("sliding_window", 256)},
        "conv": {"n_heads": 0, "n_kv_heads": 0, "scan": short_convolutions(config, hidden, taps=7)},
    }
    parts: Values = {"qk_norm": True, "head_gate": config.flag("use_attention_gate", True)}
    parts |= {"norm_place": "both" if config.flag("use_sandwich_norm", True) else "before"}
    values = decoder(config, tied=True, defaults={"head_dim": 128}) | attention_bias(config)
    return values | parts | each_layer([kinds[word] for word in words])


@family("zaya", "ZayaForCausalLM")
def zaya(config: Fields) -> Values:
    """Reads ZAYA: convolutions of queries and keys, half of each value from the token before, a router of three layers
    that may skip all experts, and scales on the stream. Those of the embedding count to the first layer, and those of
    the router's state to the others."""
    layers, hidden = config.integer("num_hidden_layers", 40), config.integer("hidden_size")
    words = layer_words(config, "layer_types", ("hybrid", "hybrid_sliding"), ["hybrid"] * layers)
    window = config.integer("sliding_window") if config.stated("sliding_window") else None
    router = config.integer("router_hidden_size", 256)
    moe = experts(config, config.first_of("num_experts", "num_local_experts"), config.integer("moe_intermediate_size"))
    sizes = {"n_layers": 40, "n_heads": 8, "n_kv_heads": 2, "head_dim": 128, "ffn_hidden": 0}
    values = decoder(config, tied=True, defaults=sizes) | attention_bias(config)
    scales = int(str(values["n_kv_heads"]))
    changes: list[Values] = [
        {
            "sliding_window": window if word == "hybrid_sliding" else None,
            "other_parameters": scales + (router if number else 2 * hidden),
        }
        for number, word in enumerate(words)
    ]
    parts: Values = {
        "head_bias": config.flag("lm_head_bias"),
        "qk_norm": True,
        "qk_norm_over": "plain",
        "qk_conv_taps": config.integer("cca_time0", 2),
        "head_conv_taps": config.integer("cca_time1", 2),
        "residual_scales": True,
        "moe": replace(moe, zero_experts=1, router_width=router),
    }
    return values | parts | each_layer(changes)


@family("jetmoe", "JetMoeForCausalLM", ignored=("aux_loss_coef", "num_attention_heads"))
def jetmoe(config: Fields) -> Values:
    """Reads JetMoE: experts make queries and read the attention's output, and a mixture of as many in the feed-forward,
    each with a bias on its sum."""
    config.expect("activation_function", "silu")
    layers, hidden = config.integer("num_hidden_layers", 12), config.integer("hidden_size")
    heads = config.integer("num_key_value_heads", 16)
    width = config.integer("intermediate_size", 5632)
    moe = experts(config, "num_local_experts", width)
    return {
        "n_layers": layers,
        "hidden": hidden,
        "n_heads": heads * moe.top_k,
        "n_kv_heads": heads,
        "head_dim": config.integer(config.first_of("kv_channels", "head_dim"), 128),
        "ffn_hidden": width,
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "attention_experts": moe.n_experts,
        "other_parameters": 2 * hidden,
        "moe": moe,
    }
