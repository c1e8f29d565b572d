"""Reads the config.json of the LayerNorm families with a two-matrix feed-forward: GPT-2, BERT, MPT, BLOOM, OPT.

Each reader returns the fields of ModelSpec except its name. Keys and defaults follow the family's configuration class
in Hugging Face transformers.
"""

from __future__ import annotations

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import PLAIN
from forerun.describe.model.spec_file import even_head_dim

BIASES = ("qkv_bias", "out_bias", "mlp_bias", "norm_bias")
_MPT_NORMS = {
    "low_precision_layernorm": "layernorm",
    "layernorm": "layernorm",
    "low_precision_rmsnorm": "rmsnorm",
    "rmsnorm": "rmsnorm",
}
_MPT_ATTENTION_IGNORED = (
    *("alibi_bias_max", "attn_impl", "attn_pdrop", "attn_uses_sequence_id", "clip_qkv", "fused_qkv", "softmax_scale"),
    *("kv_n_heads", "model_type", "rope_dail_config", "rope_hf_config", "rope_impl", "rope_theta"),
)
_MPT_ATTENTION_TYPES = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
_OPT_POSITION_OFFSET = 2
"""OPT's position table starts with two rows that no position uses (OPTLearnedPositionalEmbedding)"""


@family("gpt2", "GPT2LMHeadModel")
def gpt2(config: Fields) -> Values:
    """Reads GPT-2, whose keys have its own names or the common ones."""
    hidden = config.integer(config.first_of("n_embd", "hidden_size"))
    return stack(
        config,
        n_layers=config.integer(config.first_of("n_layer", "num_hidden_layers")),
        hidden=hidden,
        n_heads=config.integer(config.first_of("n_head", "num_attention_heads")),
        ffn_hidden=config.integer("n_inner", 4 * hidden),
        mlp=PLAIN[config.text("activation_function", "gelu_new", PLAIN)],
        position="learned",
        max_positions=config.integer(config.first_of("n_positions", "max_position_embeddings")),
    )


@family("bloom", "BloomForCausalLM", "BloomModel")
def bloom(config: Fields) -> Values:
    """Reads BLOOM: ALiBi, and a norm after the embedding. Its feed-forward is always 4 x hidden and GELU."""
    hidden = config.integer(config.first_of("hidden_size", "n_embed"))
    config.expect("n_inner", 4 * hidden)
    return stack(
        config,
        n_layers=config.integer(config.first_of("n_layer", "num_hidden_layers")),
        hidden=hidden,
        n_heads=config.integer(config.first_of("n_head", "num_attention_heads")),
        ffn_hidden=4 * hidden,
        mlp="gelu",
        position="alibi",
        embedding_norm=True,
    )


@family("opt", "OPTForCausalLM")
def opt(config: Fields) -> Values:
    """Reads OPT with the norm before each half (all sizes but 350m, which also projects its embedding)."""
    hidden = config.integer("hidden_size")
    config.expect("word_embed_proj_dim", hidden)
    config.expect("do_layer_norm_before", True)
    config.expect("layer_norm_elementwise_affine", True)
    return stack(
        config,
        biases=config.flag("enable_bias", True),
        n_layers=config.integer("num_hidden_layers"),
        hidden=hidden,
        n_heads=config.integer("num_attention_heads"),
        ffn_hidden=config.integer("ffn_dim"),
        mlp=PLAIN[config.text("activation_function", "relu", PLAIN)],
        position="learned",
        max_positions=config.integer("max_position_embeddings") + _OPT_POSITION_OFFSET,
        final_norm=not config.flag("_remove_final_layer_norm"),
        norm_bias=True,
    )


@family("mpt", "MPTForCausalLM", "MptForCausalLM")
def mpt(config: Fields) -> Values:
    """Reads MPT: ALiBi or a position table, with or without biases; newer files group keys and values."""
    n_heads = config.integer("n_heads")
    hidden = config.integer("d_model")
    attention = config.section("attn_config") or Fields({}, config.place)
    alibi = attention.flag("alibi", True)
    kv_heads = _mpt_kv_heads(attention, n_heads)
    feed_forward = config.section("ffn_config")
    if feed_forward:
        feed_forward.expect("ffn_type", "mptmlp")
    learned = config.flag("learned_pos_emb", True) and not alibi
    ratio = config.number("expansion_ratio") or 4.0
    if ratio * hidden != int(ratio * hidden):
        raise config.error("expansion_ratio", f"{ratio} times d_model {hidden} is not a whole width")
    norm = config.text("norm_type", "low_precision_layernorm", _MPT_NORMS)
    return stack(
        config,
        biases=not config.flag("no_bias", True),
        n_layers=config.integer("n_layers"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        ffn_hidden=int(ratio * hidden),
        mlp="gelu",
        norm=_MPT_NORMS[norm],
        position="alibi" if alibi else "learned" if learned else "none",
        max_positions=config.integer("max_seq_len") if learned else 0,
    )


@family("bert", "BertForMaskedLM", "BertForPreTraining", "BertModel")
@family("roberta", "RobertaForMaskedLM", "RobertaModel")
@family("xlm-roberta", "XLMRobertaForMaskedLM", "XLMRobertaModel")
@family("camembert", "CamembertForMaskedLM", "CamembertModel")
def bert(config: Fields) -> Values:
    """Reads BERT and RoBERTa: encoders with token types. The class says whether it has a pooler, and which heads."""
    config.expect("is_decoder", False)
    config.expect("position_embedding_type", "absolute")
    classes = [str(name) for name in config.items("architectures")]
    pretraining = "BertForPreTraining" in classes
    masked = any(name.endswith("ForMaskedLM") for name in classes)
    return stack(
        config,
        n_layers=config.integer("num_hidden_layers"),
        hidden=config.integer("hidden_size"),
        n_heads=config.integer("num_attention_heads"),
        ffn_hidden=config.integer("intermediate_size"),
        mlp=PLAIN[config.text("hidden_act", "gelu", PLAIN)],
        position="learned",
        max_positions=config.integer("max_position_embeddings"),
        causal=False,
        embedding_norm=True,
        final_norm=False,
        token_types=config.integer("type_vocab_size"),
        pooler=not masked,
        pooler_classes=2 if pretraining else 0,
        head_transform=pretraining or masked,
        head_bias=pretraining or masked,
    )


def _mpt_kv_heads(attention: Fields, n_heads: int) -> int:
    attention.expect("prefix_lm", False)
    attention.expect("qk_ln", False)
    attention.expect("qk_gn", False)
    attention.expect("rope", False)
    attention.expect("sliding_window_size", -1)
    kind = attention.text("attn_type", "multihead_attention", _MPT_ATTENTION_TYPES)
    kv_heads = {"multihead_attention": n_heads, "multiquery_attention": 1}.get(kind) or attention.integer("kv_n_heads")
    attention.refuse_misspelt(attention.unread(_MPT_ATTENTION_IGNORED))
    return kv_heads


def stack(config: Fields, hidden: int, n_heads: int, biases: bool = True, **values: object) -> Values:
    """Returns the fields that these families share: as many key/value heads as heads, LayerNorm, biases on all matrices
    or on none, a tied embedding."""
    shared: Values = {
        "hidden": hidden,
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "head_dim": even_head_dim(config, hidden, n_heads),
        "vocab": config.integer("vocab_size"),
        "norm": "layernorm",
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        **dict.fromkeys(BIASES, biases),
    }
    return shared | values
