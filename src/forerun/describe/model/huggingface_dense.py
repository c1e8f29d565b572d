"""Reads the config.json of dense decoders that place norms, windows or positions otherwise than Llama.

Each reader returns the fields of ModelSpec except its name. Keys and defaults follow the family's configuration class
in Hugging Face transformers.
"""

from __future__ import annotations

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import attention_bias, decoder, optional, window
from forerun.describe.model.layer_lists import FULL, SLIDING, each_layer, every, layer_words

_TANH = "gelu_pytorch_tanh"


@family("arcee", "ArceeForCausalLM")
def arcee(config: Fields) -> Values:
    """Reads Arcee: Llama with a feed-forward of two matrices and a squared ReLU."""
    return decoder(config, activation="relu2") | attention_bias(config) | {"mlp_bias": config.flag("mlp_bias")}


@family("helium", "HeliumForCausalLM")
@family("ministral3", "Ministral3ForCausalLM")
def plain(config: Fields) -> Values:
    """Reads decoders that have Llama's architecture under another name."""
    return decoder(config) | attention_bias(config) | window(config, optional(config, "sliding_window"))


@family("granite", "GraniteForCausalLM")
def granite(config: Fields) -> Values:
    """Reads Granite: Llama with scaled embeddings, residuals and logits."""
    return decoder(config) | attention_bias(config) | {"mlp_bias": config.flag("mlp_bias")}


@family("seed_oss", "SeedOssForCausalLM")
def seed_oss(config: Fields) -> Values:
    """Reads Seed-OSS: Llama with biases on queries, keys and values."""
    biases = {"qkv_bias": config.flag("attention_bias", True), "out_bias": config.flag("attention_out_bias")}
    return decoder(config) | biases | {"mlp_bias": config.flag("mlp_bias")}


@family("ernie4_5", "Ernie4_5ForCausalLM")
def ernie4_5(config: Fields) -> Values:
    """Reads ERNIE 4.5: Llama with one key for all biases, and a tied embedding."""
    bias = config.flag("use_bias")
    return decoder(config, tied=True) | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}


@family("glm", "GlmForCausalLM")
def glm(config: Fields) -> Values:
    """Reads GLM-4 of 2024: Llama with biases on queries, keys and values."""
    return decoder(config) | {"qkv_bias": config.flag("attention_bias")}


@family("glm4", "Glm4ForCausalLM")
def glm4(config: Fields) -> Values:
    """Reads GLM-4 of 2025: a norm before and after each half."""
    return glm(config) | {"norm_place": "both"}


@family("glm4v_text", "Glm4vForConditionalGeneration")
def glm4v_text(config: Fields) -> Values:
    """Reads the language model of GLM-4V: GLM-4 of 2025 with biases on queries, keys and values."""
    return glm4(config) | {"qkv_bias": config.flag("attention_bias", True)}


@family("mllama_text_model", "MllamaForCausalLM", "MllamaForConditionalGeneration")
def mllama_text_model(config: Fields) -> Values:
    """Reads the language model of Llama 3.2 Vision: Llama, some of whose layers attend to the image in place of the
    sequence, with norms on queries and keys and a gate for each half."""
    values, layers = decoder(config, needs_kv_heads=True), config.integer("num_hidden_layers")
    of_image = config.items("cross_attention_layers") or [3, 8, 13, 18, 23, 28, 33, 38]
    own = 2 * int(str(values["head_dim"])) + 2
    changes = [
        {"cross_attention": "instead", "other_parameters": own}
        if layer in of_image
        else {"cross_attention": "none", "other_parameters": 0}
        for layer in range(layers)
    ]
    return values | each_layer(changes)


@family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM")
def hunyuan(config: Fields) -> Values:
    """Reads Hunyuan: Llama with norms on queries and keys."""
    return decoder(config) | attention_bias(config) | {"qk_norm": True}


@family("ministral", "MinistralForCausalLM")
def ministral(config: Fields) -> Values:
    """Reads Ministral: Mistral with windows by layer."""
    return decoder(config) | window(config, optional(config, "sliding_window"))


@family("smollm3", "SmolLM3ForCausalLM")
def smollm3(config: Fields) -> Values:
    """Reads SmolLM3: every fourth layer has no rotary positions."""
    layers, interval = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    rotary = config.items("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    width = optional(config, "sliding_window") if config.flag("use_sliding_window") else None
    words = layer_words(config, "layer_types", (FULL, SLIDING), [FULL] * layers)
    changes = [
        {"position": "rope" if turns else "none", "sliding_window": width if word == SLIDING else None}
        for word, turns in zip(words, rotary, strict=False)
    ]
    bias = {"mlp_bias": config.flag("mlp_bias")}
    return decoder(config, tied=True) | attention_bias(config) | bias | each_layer(changes)


@family("gemma2", "Gemma2ForCausalLM")
def gemma2(config: Fields) -> Values:
    """Reads Gemma 2: norms around each half, and a window in every other layer."""
    layers = config.integer("num_hidden_layers")
    return _gemma(config, [SLIDING if layer % 2 == 0 else FULL for layer in range(layers)]) | {"norm_place": "both"}


@family("vaultgemma", "VaultGemmaForCausalLM")
def vaultgemma(config: Fields) -> Values:
    """Reads VaultGemma: Gemma 2 without the norms after each half."""
    layers = config.integer("num_hidden_layers")
    return _gemma(config, [SLIDING if layer % 2 == 0 else FULL for layer in range(layers)])


@family("gemma3_text", "Gemma3ForCausalLM")
def gemma3(config: Fields) -> Values:
    """Reads Gemma 3: Gemma 2 with norms on queries and keys, and five layers with a window to one without."""
    config.expect("use_bidirectional_attention", False)
    layers = config.integer("num_hidden_layers", 26)
    period = config.integer(config.first_of("sliding_window_pattern", "_sliding_window_pattern"), 6)
    values = _gemma(config, every(period, FULL, SLIDING, layers), gemma3_defaults=True)
    return values | {"norm_place": "both", "qk_norm": True}


def _gemma(config: Fields, windows: list[str], gemma3_defaults: bool = False) -> Values:
    config.text("hidden_activation", _TANH, (_TANH,))
    config.stated("hidden_act")
    defaults = (
        {"n_heads": 8, "n_kv_heads": 4, "head_dim": 256, "vocab": 262208, "n_layers": 26} if gemma3_defaults else {}
    )
    values = decoder(config, tied=True, activation=_TANH, defaults=defaults)
    return values | attention_bias(config) | window(config, config.integer("sliding_window", 4096), windows)


@family("cohere", "CohereForCausalLM")
def cohere(config: Fields) -> Values:
    """Reads Command R: attention and feed-forward side by side behind one LayerNorm without bias, a tied embedding."""
    values = decoder(config, tied=True) | attention_bias(config)
    norms = {"qk_norm": True, "qk_norm_over": "all_heads"} if config.flag("use_qk_norm") else {}
    return values | {"norm": "layernorm", "parallel": True, "shared_norm": True} | norms


@family("cohere2", "Cohere2ForCausalLM")
def cohere2(config: Fields) -> Values:
    """Reads Command R7B and A: three layers with a window and rotary positions to one with neither."""
    layers = config.integer("num_hidden_layers")
    period = config.integer(config.first_of("sliding_window_pattern", "_sliding_window_pattern"), 4)
    words = layer_words(config, "layer_types", (FULL, SLIDING), every(period, FULL, SLIDING, layers))
    width = config.integer("sliding_window", 4096)
    changes = [
        {"sliding_window": width, "position": "rope"}
        if word == SLIDING
        else {"sliding_window": None, "position": "none"}
        for word in words
    ]
    return cohere(config) | each_layer(changes)


@family("exaone4", "Exaone4ForCausalLM")
def exaone4(config: Fields) -> Values:
    """Reads EXAONE 4: norms after each half and on queries and keys; layers without a window have no positions."""
    width, layers = optional(config, "sliding_window"), config.integer("num_hidden_layers")
    words = _exaone_words(config, layers) if width else [FULL] * layers
    words = layer_words(config, "layer_types", (FULL, SLIDING), words)
    changes = [
        {"sliding_window": width, "position": "rope"}
        if word == SLIDING or width is None
        else {"sliding_window": None, "position": "none"}
        for word in words
    ]
    return decoder(config) | {"norm_place": "after", "qk_norm": True} | each_layer(changes)


def _exaone_words(config: Fields, layers: int) -> list[str]:
    """Returns the words of a pattern such as LLLG, or of a number of layers; the last layer has no window."""
    if config.is_text("sliding_window_pattern"):
        pattern = config.text("sliding_window_pattern")
        words = [SLIDING if pattern[layer % len(pattern)] == "L" else FULL for layer in range(layers)]
    else:
        words = every(config.integer("sliding_window_pattern", 4), FULL, SLIDING, layers)
    return [*words[:-1], FULL]


@family("olmo", "OlmoForCausalLM")
def olmo(config: Fields) -> Values:
    """Reads the first OLMo: Llama with LayerNorms that have no weights."""
    return decoder(config) | attention_bias(config) | {"norm": "layernorm", "norm_weight": False}


@family("olmo2", "Olmo2ForCausalLM")
def olmo2(config: Fields) -> Values:
    """Reads OLMo 2: norms after each half, and on all queries and all keys."""
    norms = {"norm_place": "after", "qk_norm": True, "qk_norm_over": "all_heads"}
    return decoder(config) | attention_bias(config) | norms


@family("olmo3", "Olmo3ForCausalLM")
def olmo3(config: Fields) -> Values:
    """Reads OLMo 3: OLMo 2 with three layers with a window to one without."""
    layers = config.integer("num_hidden_layers")
    return olmo2(config) | window(config, config.integer("sliding_window", 4096), every(4, FULL, SLIDING, layers))


@family("stablelm", "StableLmForCausalLM")
def stablelm(config: Fields) -> Values:
    """Reads StableLM: LayerNorms, and in some sizes halves side by side and norms of each head."""
    parallel = config.flag("use_parallel_residual")
    return decoder(config) | {
        "norm": "layernorm",
        "norm_bias": True,
        "qkv_bias": config.flag("use_qkv_bias"),
        "qk_norm": config.flag("qk_layernorm"),
        "qk_norm_over": "all_heads",
        "parallel": parallel,
        "shared_norm": parallel,
    }


@family("starcoder2", "Starcoder2ForCausalLM")
def starcoder2(config: Fields) -> Values:
    """Reads StarCoder2: LayerNorms, biases, a feed-forward of two matrices, a tied embedding."""
    config.expect("mlp_type", "default")
    config.expect("norm_type", "layer_norm")
    bias = config.flag("use_bias", True)
    values = decoder(config, tied=True, activation=_TANH, gated=False)
    values |= window(config, optional(config, "sliding_window"))
    return values | {"norm": "layernorm", "norm_bias": True, "qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}


@family("nemotron", "NemotronForCausalLM")
def nemotron(config: Fields) -> Values:
    """Reads Nemotron: LayerNorms, a feed-forward of two matrices and a squared ReLU."""
    values = decoder(config, activation="relu2", gated=False) | attention_bias(config)
    return values | {"norm": "layernorm", "norm_bias": True, "mlp_bias": config.flag("mlp_bias")}


@family("persimmon", "PersimmonForCausalLM")
def persimmon(config: Fields) -> Values:
    """Reads Persimmon: Nemotron with biases everywhere and norms on queries and keys."""
    values = decoder(config, activation="relu2", gated=False)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias"), True)
    return values | biases | {"norm": "layernorm", "qk_norm": config.flag("qk_layernorm", True)}


@family("phi", "PhiForCausalLM")
def phi(config: Fields) -> Values:
    """Reads Phi-1 and Phi-2: halves side by side behind one LayerNorm, biases everywhere."""
    values = decoder(config, activation="gelu_new", gated=False)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias", "head_bias"), True)
    halves = {"parallel": True, "shared_norm": True, "qk_norm": config.flag("qk_layernorm")}
    return values | biases | halves | {"norm": "layernorm"}
