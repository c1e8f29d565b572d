"""Reads the config.json of Llama-like dense decoders: rotary positions, RMSNorm before each half, gated feed-forward.

Each reader returns the fields of ModelSpec except its name. Keys and defaults follow the family's configuration class
in Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.layer_lists import FULL, SLIDING, each_layer, layer_words
from forerun.describe.model.spec_file import even_head_dim

_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu"}
PLAIN = {
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh"), "gelu"),
    **dict.fromkeys(("silu", "swish", "xielu"), "gelu"),
    "relu": "relu",
    "relu2": "relu2",
}
"""feed-forwards of two matrices, by their activation; silu and xIELU cost the same as gelu"""
_MISTRAL_WINDOW = 4096
"""MistralConfig's default where `sliding_window` is not in the file at all"""


@family("llama", "LlamaForCausalLM", "LLaMAForCausalLM")
def llama(config: Fields) -> Values:
    """Reads Llama 2 and 3, and the many models that share their architecture."""
    values = decoder(config)
    bias = config.flag("attention_bias")
    mlp_bias = config.flag("mlp_bias")
    return values | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": mlp_bias} | window(config, None)


@family("mistral", "MistralForCausalLM")
def mistral(config: Fields) -> Values:
    """Reads Mistral: Llama with a sliding window."""
    width = optional(config, "sliding_window") if config.present("sliding_window") else _MISTRAL_WINDOW
    return decoder(config, needs_kv_heads=True) | window(config, width)


@family("qwen2", "Qwen2ForCausalLM")
def qwen2(config: Fields) -> Values:
    """Reads Qwen 2 and 2.5: Llama with biases on queries, keys and values."""
    return decoder(config, needs_kv_heads=True) | {"qkv_bias": True} | qwen_window(config)


@family("qwen3", "Qwen3ForCausalLM")
def qwen3(config: Fields) -> Values:
    """Reads Qwen 3: Llama with norms on queries and keys, and a stated head width."""
    values = decoder(config, needs_kv_heads=True) | attention_bias(config) | qwen_window(config)
    return values | {"qk_norm": True}


@family("gemma", "GemmaForCausalLM")
def gemma(config: Fields) -> Values:
    """Reads the first Gemma: geglu, and tied, scaled embeddings. Its `hidden_act` always means the tanh GELU."""
    if config.stated("hidden_activation"):
        config.text("hidden_activation", choices=("gelu", "gelu_pytorch_tanh"))
    values = decoder(config, needs_kv_heads=True, tied=True, activation="gelu")
    return values | attention_bias(config) | window(config, None)


@family("phi3", "Phi3ForCausalLM")
def phi3(config: Fields) -> Values:
    """Reads Phi-3 and Phi-4: Llama with fused projections, which have the same parameters."""
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    config.expect("lm_head_bias", False)
    config.expect("full_attn_mod", 1)
    config.expect("interpolate_factor", 1)
    return decoder(config) | window(config, optional(config, "sliding_window"))


def decoder(
    config: Fields,
    needs_kv_heads: bool = False,
    tied: bool = False,
    activation: str = "silu",
    gated: bool = True,
    defaults: Mapping[str, int] = MappingProxyType({}),
    width: int | None = None,
) -> Values:
    """Reads the fields that these families share.

    `tied` and `activation` are the family's defaults for `tie_word_embeddings` and `hidden_act`. `needs_kv_heads` is
    for families whose default for `num_key_value_heads` is that of one model: the key must be there. In other families
    a missing key means the number of heads. Without `gated` a feed-forward has two matrices. `defaults` has the sizes
    that the family's files leave out. `width` is that of the feed-forward, where the file has none for all.
    """

    def size(key: str, field: str) -> int:
        return config.integer(key, *([defaults[field]] if field in defaults else []))

    hidden, n_heads = config.integer("hidden_size"), size("num_attention_heads", "n_heads")
    known = {**_GATED, "relu2": "relu2"} if gated else PLAIN
    kv_default = () if needs_kv_heads else (defaults.get("n_kv_heads", n_heads),)
    stated_dim = config.stated("head_dim") or "head_dim" in defaults
    return {
        "n_layers": size("num_hidden_layers", "n_layers"),
        "hidden": hidden,
        "n_heads": n_heads,
        "n_kv_heads": config.integer("num_key_value_heads", *kv_default),
        "head_dim": size("head_dim", "head_dim") if stated_dim else even_head_dim(config, hidden, n_heads),
        "ffn_hidden": size("intermediate_size", "ffn_hidden") if width is None else width,
        "vocab": size("vocab_size", "vocab"),
        "mlp": known[config.text("hidden_act", activation, known)],
        "norm": "rmsnorm",
        "position": "rope",
        "tied_embeddings": config.flag("tie_word_embeddings", tied),
    }


def attention_bias(config: Fields, key: str = "attention_bias", default: bool = False) -> Values:
    """Reads the bias of all projections of the attention."""
    bias = config.flag(key, default)
    return {"qkv_bias": bias, "out_bias": bias}


def qwen_window(config: Fields) -> Values:
    """Reads Qwen's window in tokens, which `use_sliding_window` turns on from layer `max_window_layers` on."""
    width = optional(config, "sliding_window")
    config.expect("use_mrope", False)
    config.stated("max_window_layers")
    if not config.flag("use_sliding_window") or width is None:
        return window(config, None)
    first, layers = config.integer("max_window_layers", 0, least=0), config.integer("num_hidden_layers")
    return window(config, width, [FULL if layer < first else SLIDING for layer in range(layers)])


def window(config: Fields, width: int | None, default: Sequence[str] = ()) -> Values:
    """Reads which layers slide: those that `layer_types` says, or else `default`, or else all of them if `width` is a
    number of tokens. Returns the field `sliding_window`, or `layers` where layers differ."""
    layers = config.integer("num_hidden_layers")
    words = layer_words(config, "layer_types", (FULL, SLIDING), default or [SLIDING if width else FULL] * layers)
    if SLIDING in words and width is None:
        raise config.error("layer_types", "slides, but there is no sliding_window in use")
    return each_layer([{"sliding_window": width if word == SLIDING else None} for word in words])


def optional(config: Fields, key: str) -> int | None:
    """Reads a whole number that may be missing, null or 0."""
    return config.integer(key) if config.stated(key) and not config.is_zero(key) else None
