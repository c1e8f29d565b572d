"""Reads the config.json of GPT-like families whose halves run side by side, or that group keys and values.

Each reader returns the fields of ModelSpec except its name. Keys and defaults follow the family's configuration class
in Hugging Face transformers.
"""

from __future__ import annotations

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import PLAIN, optional
from forerun.describe.model.huggingface_gpt import BIASES, stack
from forerun.describe.model.layer_lists import each_layer


@family("gptj", "GPTJForCausalLM")
@family("codegen", "CodeGenForCausalLM")
def gptj(config: Fields) -> Values:
    """Reads GPT-J and CodeGen: one norm, rotary positions, biases on the feed-forward and the head."""
    hidden = config.integer(config.first_of("n_embd", "hidden_size"))
    return stack(
        config,
        hidden=hidden,
        n_heads=config.integer(config.first_of("n_head", "num_attention_heads")),
        n_layers=config.integer(config.first_of("n_layer", "num_hidden_layers")),
        ffn_hidden=config.integer("n_inner", 4 * hidden),
        mlp=PLAIN[config.text("activation_function", "gelu_new", PLAIN)],
        position="rope",
        qkv_bias=False,
        out_bias=False,
        head_bias=True,
        tied_embeddings=config.flag("tie_word_embeddings"),
        parallel=True,
        shared_norm=True,
    )


@family("gpt_neox", "GPTNeoXForCausalLM")
def gpt_neox(config: Fields) -> Values:
    """Reads GPT-NeoX and Pythia: halves side by side with a norm each."""
    bias = config.flag("attention_bias", True)
    return stack(
        config,
        hidden=config.integer("hidden_size"),
        n_heads=config.integer("num_attention_heads"),
        n_layers=config.integer("num_hidden_layers"),
        ffn_hidden=config.integer("intermediate_size"),
        mlp=PLAIN[config.text("hidden_act", "gelu", PLAIN)],
        position="rope",
        qkv_bias=bias,
        out_bias=bias,
        tied_embeddings=config.flag("tie_word_embeddings"),
        parallel=config.flag("use_parallel_residual", True),
    )


@family("gpt_neo", "GPTNeoForCausalLM")
def gpt_neo(config: Fields) -> Values:
    """Reads GPT-Neo: GPT-2 with a window in every other layer and no bias on queries, keys and values."""
    hidden, layers = config.integer("hidden_size"), config.integer("num_layers")
    words = config.items("attention_layers") or _repeated(config.items("attention_types"))
    width = config.integer("window_size", 256)
    values = stack(
        config,
        hidden=hidden,
        n_heads=config.integer("num_heads"),
        n_layers=layers,
        ffn_hidden=config.integer("intermediate_size", 4 * hidden),
        mlp=PLAIN[config.text("activation_function", "gelu_new", PLAIN)],
        position="learned",
        max_positions=config.integer("max_position_embeddings"),
        qkv_bias=False,
    )
    if len(words) != layers:
        raise config.error("attention_layers", f"has {len(words)} entries for {layers} layers")
    return values | each_layer([{"sliding_window": width if word == "local" else None} for word in words])


def _repeated(types: list[object]) -> list[object]:
    """Returns the words of GPT-Neo's [[words, times], ...]."""
    words: list[object] = []
    for entry in types:
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and isinstance(entry[1], int):
            words += entry[0] * entry[1]
    return words


@family("gpt_bigcode", "GPTBigCodeForCausalLM")
def gpt_bigcode(config: Fields) -> Values:
    """Reads StarCoder and SantaCoder: GPT-2 with one head of keys and values."""
    hidden, n_heads = config.integer("n_embd"), config.integer("n_head")
    return stack(
        config,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=1 if config.flag("multi_query", True) else n_heads,
        n_layers=config.integer("n_layer"),
        ffn_hidden=config.integer("n_inner", 4 * hidden),
        mlp=PLAIN[config.text("activation_function", "gelu_pytorch_tanh", PLAIN)],
        position="learned",
        max_positions=config.integer("n_positions"),
    )


@family("falcon", "FalconForCausalLM", "RWForCausalLM")
def falcon(config: Fields) -> Values:
    """Reads Falcon: halves side by side with one norm (7B) or a norm each (40B, 180B), grouped keys and values."""
    hidden = config.integer("hidden_size")
    n_heads = config.integer(config.first_of("num_attention_heads", "n_head"))
    newer, bias = config.flag("new_decoder_architecture"), config.flag("bias")
    grouped = optional(config, "num_kv_heads") or n_heads
    parallel = config.flag("parallel_attn", True) or newer
    norms = optional(config, "num_ln_in_parallel_attn") or (2 if newer else 1)
    one_head = config.flag("multi_query", True) and not newer
    return stack(
        config,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=1 if one_head else grouped,
        n_layers=config.integer(config.first_of("num_hidden_layers", "n_layer")),
        ffn_hidden=config.integer("ffn_hidden_size", 4 * hidden),
        mlp=PLAIN[config.text("activation", "gelu", PLAIN)],
        position="alibi" if config.flag("alibi") else "rope",
        parallel=parallel,
        shared_norm=parallel and norms == 1,
        **dict.fromkeys(BIASES[:3], bias),
    )
