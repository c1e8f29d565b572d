"""Reads the config.json of Gemma 4, whose layers with and without a window differ in the width of their heads.

Keys and defaults follow `Gemma4TextConfig` of Hugging Face transformers.
"""

from __future__ import annotations

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import attention_bias, decoder
from forerun.describe.model.layer_lists import FULL, SLIDING, each_layer, every, layer_words
from forerun.describe.model.spec import MoESpec

_TANH = "gelu_pytorch_tanh"
_PERIOD = 6
_SIZES = {"n_heads": 8, "n_kv_heads": 4, "head_dim": 256, "vocab": 262144, "n_layers": 30}


@family("gemma4_text", "Gemma4ForCausalLM")
def gemma4(config: Fields) -> Values:
    """Reads Gemma 4: layers with and without a window, inputs of each layer's own, shared keys and values, experts
    beside the dense feed-forward."""
    config.expect("hidden_activation", _TANH)
    if config.stated("use_bidirectional_attention"):
        config.text("use_bidirectional_attention", choices=("vision",))
    values = decoder(config, tied=True, activation=_TANH, defaults=_SIZES) | attention_bias(config)
    layers = config.integer("num_hidden_layers", _SIZES["n_layers"])
    words = layer_words(config, "layer_types", (FULL, SLIDING), every(_PERIOD, FULL, SLIDING, layers))
    words[-1] = FULL
    shared = config.integer("num_kv_shared_layers", 0, least=0)
    experts = _experts(config)
    values |= {
        "norm_place": "both",
        "qk_norm": True,
        "value_norm": True,
        "moe": experts,
        "other_parameters": 0 if experts is None else 4 * config.integer("hidden_size") + experts.n_experts,
        "layer_input": config.integer("hidden_size_per_layer_input", 256, least=0),
        "layer_input_vocab": config.integer("vocab_size_per_layer_input", 262144),
    }
    width = config.integer("sliding_window", 512)
    kinds: dict[str, Values] = {FULL: _without_window(config), SLIDING: {"sliding_window": width}}
    reused: Values = {"shared_kv": True}
    if config.flag("use_double_wide_mlp"):
        reused["ffn_hidden"] = 2 * config.integer("intermediate_size")
    stated = _stated(config)
    changes = [
        kinds[word] | stated.get(number, {}) | (reused if number >= layers - shared else {})
        for number, word in enumerate(words)
    ]
    return values | each_layer(changes)


def _without_window(config: Fields) -> Values:
    """Returns the fields that layers without a window change: wider heads, and one projection for keys and values."""
    kind: Values = {"head_dim": config.integer("global_head_dim", 512)}
    heads = "num_global_key_value_heads"
    stated = config.stated(heads)
    if config.flag("attention_k_eq_v"):
        kind |= {"equal_kv": True, **({"n_kv_heads": config.integer(heads)} if stated else {})}
    return kind


def _stated(config: Fields) -> dict[int, Values]:
    """Returns the entries of `per_layer_config` in newer files, by the number of the layer."""
    found: dict[int, Values] = {}
    overrides = config.section("per_layer_config")
    for name in [] if overrides is None else overrides.names():
        layer = None if overrides is None else overrides.section(name)
        if layer is None or not name.isdecimal():
            raise config.error("per_layer_config", f"{name!r:.40} is not a layer with its keys")
        own: Values = {}
        for key, field in (("head_dim", "head_dim"), ("num_key_value_heads", "n_kv_heads")):
            if layer.stated(key):
                own[field] = layer.integer(key)
        layer.finish()
        found[int(name)] = own
    return found


def _experts(config: Fields) -> MoESpec | None:
    """Returns the experts, to which the dense feed-forward is a shared one."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    stated = [config.stated(name) for name in names]
    if not config.flag("enable_moe_block"):
        return None
    if not all(stated):
        raise config.error("enable_moe_block", f"needs {', '.join(names)}")
    count, top_k, width = (config.integer(name) for name in names)
    return MoESpec(count, top_k, width, config.integer("intermediate_size"))
