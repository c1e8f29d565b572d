"""Reads the config.json of Zamba and Zamba2: Mamba, with blocks of attention that layers share.

Keys and defaults follow the family's configuration class in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import decoder
from forerun.describe.model.huggingface_recurrent import mamba1, mamba2_spec
from forerun.describe.model.layer_lists import each_layer, layer_words
from forerun.describe.model.scan import ScanSpec
from forerun.describe.model.shared_block import SharedBlockSpec

_WORDS = ("linear_attention", "mamba", "hybrid")
_NOTES = ("layers that share a block gather its weights once, with those of the first of them",)
_KERNELS = ("use_mem_eff_path", "kv_channels", "num_query_groups", "hybrid_layer_ids", "use_long_context")


@family("zamba", "ZambaForCausalLM", ignored=("hidden_mamba_act", "attention_hidden_size"))
def zamba(config: Fields) -> Values:
    """Reads Zamba: Mamba, and one block that every sixth layer has."""
    layers, hidden = config.integer("num_hidden_layers", 76), config.integer("hidden_size")
    config.expect("attention_hidden_size", 2 * hidden)
    config.stated("n_mamba_heads")
    period, offset = config.integer("attn_layer_period", 6), config.integer("attn_layer_offset", 4, least=0)
    behind = ["hybrid" if layer % period == offset else "mamba" for layer in range(max(0, layers - 3))]
    words = _words(config, ["mamba", "mamba", "hybrid", *behind][:layers])
    heads = config.integer("num_attention_heads", 16)
    head_dim = config.integer(config.first_of("attention_head_dim", "head_dim"), 2 * hidden // heads)
    kv_heads = config.integer("num_key_value_heads", heads)
    block = SharedBlockSpec(heads, kv_heads, head_dim, config.integer("intermediate_size", 14848))
    return _zamba(config, words, mamba1(config, "mamba"), block, 1)


@family("zamba2", "Zamba2ForCausalLM", ignored=_KERNELS)
def zamba2(config: Fields) -> Values:
    """Reads Zamba2: Mamba-2, and blocks that layers have in turn, with adapters of each layer's own."""
    config.expect("add_bias_linear", False)
    layers, hidden = config.integer("num_hidden_layers", 54), config.integer("hidden_size")
    behind = (["mamba"] * 5 + ["hybrid"]) * 7 + ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"] + ["mamba"] * 2
    words = _words(config, ["mamba", *behind][:layers])
    heads = config.integer("num_attention_heads", 32)
    rank = config.integer("adapter_rank", 128)
    head_dim = config.integer(config.first_of("attention_head_dim", "head_dim"), 2 * hidden // heads)
    block = SharedBlockSpec(
        heads,
        config.integer("num_key_value_heads", heads),
        head_dim,
        config.integer("intermediate_size", 4 * hidden),
        attention_adapter=rank if config.flag("use_shared_attention_adapter") else 0,
        ffn_adapter=rank,
        rotates=config.flag("use_mem_rope"),
    )
    mamba_heads = config.integer("n_mamba_heads", 8)
    width = config.integer("mamba_expand", 2) * hidden
    scan = mamba2_spec(
        mamba_heads,
        config.integer("mamba_headdim", width // mamba_heads),
        config.integer("mamba_ngroups", 1),
        config.integer("mamba_d_state", 64),
        config.integer("mamba_d_conv", 4),
        conv_bias=True,
        norm=True,
    )
    config.expect("use_conv_bias", True)
    return _zamba(config, words, scan, block, config.integer("num_mem_blocks", 1))


def _words(config: Fields, default: list[str]) -> list[str]:
    key = config.first_of("layers_block_type", "layer_types")
    return layer_words(config, key, _WORDS, default)


def _zamba(config: Fields, words: list[str], scan: ScanSpec, block: SharedBlockSpec, blocks: int) -> Values:
    """Returns the fields of a model whose hybrid layers have `blocks` blocks in turn."""
    config.expect("hidden_act", "gelu")
    sizes = {
        "n_layers": len(words),
        "n_heads": block.n_heads,
        "n_kv_heads": block.n_kv_heads,
        "head_dim": block.head_dim,
        "ffn_hidden": block.ffn_hidden,
    }
    values = decoder(config, tied=True, activation="gelu", defaults=sizes)
    seen, changes = 0, []
    for word in words:
        change: Values = {"n_heads": 0, "n_kv_heads": 0, "ffn_hidden": 0, "scan": scan}
        if word == "hybrid":
            change["shared_block"] = replace(block, again=seen >= blocks)
            seen += 1
        changes.append(change)
    return values | {"head_dim": block.head_dim, "position": "none", "notes": _NOTES} | each_layer(changes)
