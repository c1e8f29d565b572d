"""Reads the config.json of Llama-like dense decoders: rotary positions, RMSNorm before each half, gated feed-forward.

Each reader returns the fields of ModelSpec except its name. A key, and its absence, mean what the family's
configuration class in Hugging Face transformers says.
"""

from __future__ import annotations

from forerun.common.errors import ForerunError
from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.spec_file import even_head_dim

_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu"}
_MISTRAL_WINDOW = 4096
"""MistralConfig's default where `sliding_window` is not in the file at all"""


@family("llama", "LlamaForCausalLM", "LLaMAForCausalLM")
def llama(config: Fields) -> Values:
    """Reads Llama 2 and 3, and the many models that share their architecture."""
    values = decoder(config)
    bias = config.flag("attention_bias")
    mlp_bias = config.flag("mlp_bias")
    return values | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": mlp_bias, "sliding_window": window(config, None)}


@family("mistral", "MistralForCausalLM")
def mistral(config: Fields) -> Values:
    """Reads Mistral: Llama with a sliding window."""
    width = _width(config) if config.present("sliding_window") else _MISTRAL_WINDOW
    return decoder(config, needs_kv_heads=True) | {"sliding_window": window(config, width)}


@family("qwen2", "Qwen2ForCausalLM")
def qwen2(config: Fields) -> Values:
    """Reads Qwen 2 and 2.5: Llama with biases on queries, keys and values."""
    return decoder(config, needs_kv_heads=True) | {"qkv_bias": True, "sliding_window": qwen_window(config)}


@family("qwen3", "Qwen3ForCausalLM")
def qwen3(config: Fields) -> Values:
    """Reads Qwen 3: Llama with norms on queries and keys, and a stated head width."""
    bias = config.flag("attention_bias")
    values = decoder(config, needs_kv_heads=True)
    return values | {"qk_norm": True, "qkv_bias": bias, "out_bias": bias, "sliding_window": qwen_window(config)}


@family("gemma", "GemmaForCausalLM")
def gemma(config: Fields) -> Values:
    """Reads the first Gemma: geglu, and tied, scaled embeddings. Its `hidden_act` always means the tanh GELU."""
    if config.stated("hidden_activation"):
        config.text("hidden_activation", choices=("gelu", "gelu_pytorch_tanh"))
    bias = config.flag("attention_bias")
    values = decoder(config, needs_kv_heads=True, tied=True, activation="gelu")
    return values | {"qkv_bias": bias, "out_bias": bias, "sliding_window": window(config, None)}


@family("phi3", "Phi3ForCausalLM")
def phi3(config: Fields) -> Values:
    """Reads Phi-3 and Phi-4: Llama with fused projections, which have the same parameters."""
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    config.expect("lm_head_bias", False)
    config.expect("full_attn_mod", 1)
    config.expect("interpolate_factor", 1)
    return decoder(config) | {"sliding_window": window(config, _width(config))}


def decoder(config: Fields, needs_kv_heads: bool = False, tied: bool = False, activation: str = "silu") -> Values:
    """Reads the fields that these families share.

    `tied` and `activation` are the family's defaults for `tie_word_embeddings` and `hidden_act`. `needs_kv_heads` is
    for families whose default for `num_key_value_heads` is that of one model: the key must be there. In other families
    a missing key means as many as the heads.
    """
    hidden, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    stated_dim = config.stated("head_dim")
    return {
        "n_layers": config.integer("num_hidden_layers"),
        "hidden": hidden,
        "n_heads": n_heads,
        "n_kv_heads": config.integer("num_key_value_heads", *(() if needs_kv_heads else (n_heads,))),
        "head_dim": config.integer("head_dim") if stated_dim else even_head_dim(config, hidden, n_heads),
        "ffn_hidden": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "mlp": _GATED[config.text("hidden_act", activation, _GATED)],
        "norm": "rmsnorm",
        "position": "rope",
        "tied_embeddings": config.flag("tie_word_embeddings", tied),
    }


def qwen_window(config: Fields) -> int | None:
    """Reads Qwen's window in tokens, which `use_sliding_window` turns on from layer `max_window_layers` on."""
    width = _width(config)
    config.expect("use_mrope", False)
    config.stated("max_window_layers")
    if not config.flag("use_sliding_window") or width is None:
        return window(config, None)
    if config.stated("layer_types"):
        return window(config, width)
    first, layers = config.integer("max_window_layers", 0, least=0), config.integer("num_hidden_layers")
    if 0 < first < layers:
        raise _mixed(config, "max_window_layers")
    return width if first == 0 else None


def window(config: Fields, width: int | None) -> int | None:
    """Returns the window `width` in tokens; None where `layer_types` says that no layer slides. Layers must agree."""
    kinds = config.items("layer_types")
    if not kinds:
        return width
    if len(kinds) != config.integer("num_hidden_layers"):
        raise config.error("layer_types", f"has {len(kinds)} entries for {config.integer('num_hidden_layers')} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error("layer_types", f"{kind!r} is not supported, only full_attention and sliding_attention")
    if any(kind != kinds[0] for kind in kinds):
        raise _mixed(config, "layer_types")
    if kinds[0] == "sliding_attention" and width is None:
        raise config.error("layer_types", "slides, but there is no sliding_window in use")
    return width if kinds[0] == "sliding_attention" else None


def _width(config: Fields) -> int | None:
    return config.integer("sliding_window") if config.stated("sliding_window") else None


def _mixed(config: Fields, key: str) -> ForerunError:
    return config.error(key, "makes some layers slide and others not, which is not supported")
