"""Reads the config.json of Inkling: biases of relative positions, short convolutions, and experts.

Keys and defaults follow the family's configuration class in Hugging Face transformers. Files on the hub have older
names.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import decoder
from forerun.describe.model.huggingface_experts import experts, mixed
from forerun.describe.model.layer_lists import each_layer, layer_words

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
_NUMERICS = (
    *("shared_expert_sink", "route_scale", "logits_mup_width_multiplier", "rms_norm_eps_moe_gate"),
    *("log_scaling_n_floor", "log_scaling_alpha", "unpadded_vocab_size", "model_max_length"),
    *("num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids"),
)
_NOTES = ("the attention kernel adds the biases of relative positions in no time of its own",)


@family("inkling_text", "InklingForCausalLM", ignored=_NUMERICS)
def inkling(config: Fields) -> Values:
    """Reads Inkling: five layers with a window to one without, no rotary positions, and experts that share a router
    with those of every token."""
    layers = config.integer("num_hidden_layers", 66)
    width, routed = _widths(config)
    sizes = {"n_layers": 66, "n_heads": 64, "n_kv_heads": 8, "head_dim": 128}
    values = decoder(config, defaults=sizes, width=width)
    window = config.integer(config.first_of("sliding_window_size", "sliding_window"), 512)
    full: Values = {"relative_extent": config.integer("rel_extent", 1024)}
    sliding: Values = {
        "sliding_window": window,
        "relative_extent": window,
        "n_heads": config.integer("swa_num_attention_heads", 64),
        "n_kv_heads": config.integer("swa_num_key_value_heads", 16),
        "head_dim": config.integer("swa_head_dim", 128),
    }
    words = layer_words(config, "layer_types", (_FULL, _SLIDING), _usual_words(config, layers))
    values |= {
        "tied_embeddings": False,
        "position": "none",
        "qk_norm": True,
        "embedding_norm": True,
        "conv_taps": config.integer(config.first_of("conv_kernel_size", "sconv_kernel_size"), 4),
        "relative_rank": config.integer("d_rel", 16),
        "other_parameters": 1,
        "notes": _NOTES,
    }
    values |= each_layer([sliding if word == _SLIDING else full for word in words])
    shared = config.integer("n_shared_experts", 2)
    moe = experts(config, "n_routed_experts", routed, shared * routed, router_bias=True)
    dense = config.integer("dense_mlp_idx", 0, least=0)
    sparse = ["dense"] * min(dense, layers) + ["sparse"] * max(0, layers - dense)
    sparse = layer_words(config, "mlp_layer_types", ("dense", "sparse"), sparse)
    return values | mixed(values, replace(moe, scored_shared=shared), [word == "sparse" for word in sparse])


def _widths(config: Fields) -> tuple[int, int]:
    """Returns the widths of the dense feed-forward and of an expert; files on the hub call them otherwise."""
    if config.stated("dense_intermediate_size"):
        return config.integer("dense_intermediate_size"), config.integer("intermediate_size")
    return config.integer("intermediate_size", 24576), config.integer("moe_intermediate_size", 3072)


def _usual_words(config: Fields, layers: int) -> list[str]:
    """Returns the words of layers where the file has none: by the numbers of those with a window, or five to one."""
    if config.stated("local_layer_ids"):
        local = config.items("local_layer_ids")
        return [_SLIDING if layer in local else _FULL for layer in range(layers)]
    return [_SLIDING if (layer + 1) % 6 else _FULL for layer in range(layers)]
