"""Reads the config.json of LongCat-Flash (arXiv 2509.01322), whose layers have two attentions and two feed-forwards.

The experts read the input of the first feed-forward, and their output is added after the second one.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_experts import experts, latent

_NOTES = ("routers choose experts without weights as often as others",)


@family("longcat_flash", "LongcatFlashForCausalLM", ignored=("mla_scale_q_lora", "mla_scale_kv_lora"))
def longcat_flash(config: Fields) -> Values:
    """Reads LongCat-Flash. A layer has latent attention twice, a dense feed-forward twice, and experts; some experts
    only return their token.
    """
    config.expect("hidden_act", "silu")
    config.expect("zero_expert_type", "identity")
    config.expect("attention_method", "MLA")
    config.expect("router_bias", False)
    heads, mla, bias = config.integer("num_attention_heads"), latent(config), config.flag("attention_bias")
    config.expect("num_key_value_heads", heads)
    layers = _layers(config)
    dense = config.integer(config.first_of("ffn_hidden_size", "intermediate_size"))
    width = config.integer(config.first_of("expert_ffn_hidden_size", "moe_intermediate_size"))
    top_k = config.first_of("moe_topk", "num_experts_per_tok")
    moe = experts(config, "n_routed_experts", width, router_bias=True, top_k=top_k)
    moe = replace(moe, zero_experts=config.integer("zero_expert_num", 0, least=0))
    return {
        "n_layers": layers,
        "hidden": config.integer("hidden_size"),
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": mla.v_head_dim,
        "ffn_hidden": dense,
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "out_bias": bias,
        "mla": mla,
        "moe": moe,
        "shortcut": True,
        "notes": _NOTES,
    }


def _layers(config: Fields) -> int:
    """Returns the number of layers; newer files also state that of attentions, which is twice that."""
    if not config.stated("num_layers"):
        return config.integer("num_hidden_layers", least=2) // 2
    layers = config.integer("num_layers")
    config.expect("num_hidden_layers", layers, 2 * layers)
    return layers
