"""Reads the config.json of families with several residual streams.

Keys and defaults follow the family's configuration class in Hugging Face transformers.
"""

from __future__ import annotations

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import attention_bias, decoder
from forerun.describe.model.huggingface_mixtures import indexed, latent_experts
from forerun.describe.model.layer_lists import FULL, SLIDING, each_layer, every, layer_words
from forerun.describe.model.streams import StreamsSpec

_TANH = "gelu_pytorch_tanh"
_ALTUP = ("altup_active_idx", "altup_coef_clip", "altup_correct_scale", "altup_lr_multiplier")
_SPARSE_LAYERS = 10
_GEMMA3N = {"n_heads": 8, "n_kv_heads": 2, "head_dim": 256, "n_layers": 35}


@family("gemma3n_text", "Gemma3nForCausalLM", ignored=_ALTUP)
def gemma3n(config: Fields) -> Values:
    """Reads Gemma 3n: four streams under AltUp, learned residuals, inputs of each layer's own, shared keys and values,
    and a sparse gate in the first layers."""
    config.expect("hidden_activation", _TANH)
    layers = config.integer("num_hidden_layers", _GEMMA3N["n_layers"])
    widths = _each(config, "intermediate_size", layers)
    values = decoder(config, tied=True, defaults=_GEMMA3N, width=max(widths, default=None))
    words = layer_words(config, "layer_types", (FULL, SLIDING), every(5, FULL, SLIDING, layers))
    shared = config.integer("num_kv_shared_layers", 15, least=0)
    sources = words[: max(0, layers - shared)]
    if set(words) - set(sources):
        raise config.error(
            "num_kv_shared_layers", f"{shared} of {layers} layers leave none to share keys and values of"
        )
    window = config.integer("sliding_window", 512)
    changes: list[Values] = [
        {"sliding_window": window if word == SLIDING else None, "shared_kv": number >= layers - shared}
        for number, word in enumerate(words)
    ]
    if len(set(widths)) > 1:
        for change, width in zip(changes, widths, strict=True):
            change["ffn_hidden"] = width
    for change, sparse in zip(changes, _sparse(config, layers), strict=True):
        change["sparse_gate"] = sparse
    fields: Values = {
        "mlp": "geglu",
        "norm_place": "both",
        "qk_norm": True,
        "value_norm": True,
        "layer_input": config.integer("hidden_size_per_layer_input", 256),
        "layer_input_vocab": config.integer("vocab_size_per_layer_input", 262144),
        "streams": StreamsSpec(config.integer("altup_num_inputs", 4, least=2), "altup"),
        "laurel_rank": config.integer("laurel_rank", 64),
    }
    return values | attention_bias(config) | fields | each_layer(changes)


def _each(config: Fields, key: str, layers: int) -> list[int]:
    """Returns the whole numbers of a key that may be a list with one for each layer; empty if it is not a list."""
    if not config.is_list(key):
        return []
    numbers = config.items(key)
    if len(numbers) != layers:
        raise config.error(key, f"has {len(numbers)} entries for {layers} layers")
    return [Fields({key: number}, config.place).integer(key) for number in numbers]


def _sparse(config: Fields, layers: int) -> list[bool]:
    """Returns the layers that have a sparse gate: those whose share of zeros is above 0."""
    key = "activation_sparsity_pattern"
    if not config.stated(key):
        first = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        return [number < first for number in range(layers)]
    shares = config.items(key)
    if len(shares) != layers:
        raise config.error(key, f"has {len(shares)} entries for {layers} layers")
    return [(Fields({key: share}, config.place).probability(key) or 0) > 0 for share in shares]


@family("hy_v4", "HYV4ForCausalLM", ignored=("hc_magnitude", "hc_eps", "learnable_sink_init"))
def hy_v4(config: Fields) -> Values:
    """Reads Hunyuan 4: streams joined by gates, latent attention with a gate and sinks, indexers that layers share, and
    experts behind dense first layers."""
    values = latent_experts(config)
    parts = {"streams": StreamsSpec(config.integer("hc_mult", 4, least=2), "gated"), "sinks": True}
    layers = config.integer("num_hidden_layers")
    words = ["full" if layer == 0 or layer % 4 == 1 else "shared" for layer in range(layers)]
    return values | parts | {"attention_gate": True} | each_layer(indexed(config, words))
