"""Reads the config.json of encoder-decoders: T5, BART and their relatives, and Whisper.

Each reader returns the fields of the decoder as those of ModelSpec except its name, with the encoder as its `encoder`.
Keys and defaults follow the family's configuration class in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.describe.model.encoder import EncoderSpec
from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import PLAIN
from forerun.describe.model.huggingface_towers import whisper_encoder
from forerun.describe.model.spec import ModelSpec
from forerun.describe.model.spec_file import even_head_dim

_GATED = {"gated-gelu": "geglu", "gated-silu": "swiglu"}
_T5_TOKENS = 512
"""tokens of a source text on which T5 was trained (arXiv 1910.10683, section 3.1.2)"""
_OFFSET = 2
"""rows of BART's position tables beyond `max_position_embeddings`"""


@family("t5", "T5ForConditionalGeneration", "T5WithLMHeadModel", encodes=True)
@family("mt5", "MT5ForConditionalGeneration", encodes=True)
def t5(config: Fields) -> Values:
    """Reads T5: RMSNorm before each half, and biases of relative positions that the layers of a stack share."""
    values = _t5(config)
    heads = config.integer("num_heads")
    tables = 2 * config.integer("relative_attention_num_buckets", 32) * heads
    return _with_encoder(config, values, config.integer("num_layers"), _t5_tokens(config), tables)


@family("umt5", "UMT5ForConditionalGeneration", encodes=True)
def umt5(config: Fields) -> Values:
    """Reads UMT5: T5 with biases of relative positions for each layer."""
    own = config.integer("relative_attention_num_buckets", 32) * config.integer("num_heads")
    values = _t5(config) | {"other_parameters": own}
    return _with_encoder(config, values, config.integer("num_layers"), _t5_tokens(config))


def _t5(config: Fields) -> Values:
    """Returns the fields of T5's decoder."""
    layers, heads = config.integer("num_layers"), config.integer("num_heads")
    mlp = config.text("feed_forward_proj", "relu", (*_GATED, *PLAIN))
    config.stated("dense_act_fn")
    config.stated("is_gated_act")
    return {
        "n_layers": config.integer("num_decoder_layers", layers),
        "hidden": config.integer("d_model"),
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": config.integer("d_kv"),
        "ffn_hidden": config.integer("d_ff"),
        "vocab": config.integer("vocab_size"),
        "mlp": _GATED.get(mlp) or PLAIN[mlp],
        "position": "none",
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "cross_attention": "behind",
    }


def _t5_tokens(config: Fields) -> int:
    return config.integer("n_positions", _T5_TOKENS)


def _with_encoder(config: Fields, values: Values, layers: int, tokens: int, other_parameters: int = 0) -> Values:
    """Adds the encoder of a text, of `layers` layers like those of the decoder, to its `values`."""
    stack = _stack(values | {"n_layers": layers})
    encoder = EncoderSpec(stack, tokens, "text", "attention", other_parameters=other_parameters)
    return values | {"encoder": encoder}


def _stack(values: Values) -> ModelSpec:
    """Returns an encoder's stack with the decoder's `values`."""
    return ModelSpec(name="encoder", **{**values, "causal": False, "cross_attention": "none"})  # type: ignore[arg-type]


@family("bart", "BartForConditionalGeneration", "BartModel", encodes=True)
@family("plbart", "PLBartForConditionalGeneration", encodes=True)
def bart(config: Fields) -> Values:
    """Reads BART: LayerNorm behind each half and behind the embedding, learned positions, biases everywhere."""
    return _bart(config, "learned", _OFFSET)


@family("mbart", "MBartForConditionalGeneration", encodes=True)
def mbart(config: Fields) -> Values:
    """Reads mBART: BART with norms before each half and behind the last layer."""
    return _bart(config, "learned", _OFFSET, before=True)


@family("blenderbot", "BlenderbotForConditionalGeneration", encodes=True)
def blenderbot(config: Fields) -> Values:
    """Reads Blenderbot: mBART without a norm behind the embedding."""
    return _bart(config, "learned", 0, before=True, embedding_norm=False)


@family("pegasus", "PegasusForConditionalGeneration", encodes=True)
@family("m2m_100", "M2M100ForConditionalGeneration", encodes=True)
def pegasus(config: Fields) -> Values:
    """Reads Pegasus, M2M-100 and NLLB: norms before each half, positions that are not trained."""
    return _bart(config, "sinusoidal", 0, before=True, embedding_norm=False)


@family("marian", "MarianMTModel", encodes=True)
def marian(config: Fields) -> Values:
    """Reads Marian: BART with positions that are not trained and without a norm behind the embedding."""
    config.expect("share_encoder_decoder_embeddings", True)
    config.stated("decoder_vocab_size")
    return _bart(config, "sinusoidal", 0, embedding_norm=False)


def _bart(config: Fields, position: str, offset: int, before: bool = False, embedding_norm: bool = True) -> Values:
    """Returns the fields of a decoder of BART's relatives, with the encoder.

    `offset` is the number of rows of a learned position table beyond the stated one; `before` says where norms are.
    """
    tokens = config.integer("max_position_embeddings", 1024)
    shared = {
        "hidden": config.integer("d_model"),
        "vocab": config.integer("vocab_size"),
        "mlp": PLAIN[config.text("activation_function", "gelu", PLAIN)],
        "norm": "layernorm",
        "position": position,
        "max_positions": tokens + offset,
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "embedding_norm": embedding_norm,
        "norm_place": "before" if before else "after",
        "final_norm": before,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias"), True),
    }
    config.expect("scale_embedding", True, False)
    stack = _stack(shared | _halves(config, "encoder"))
    encoder = EncoderSpec(stack, tokens, "text", "attention")
    return shared | _halves(config, "decoder") | {"cross_attention": "behind", "encoder": encoder}


def _halves(config: Fields, which: str) -> Values:
    """Reads the layers, heads and feed-forward of one of both stacks."""
    heads = config.integer(f"{which}_attention_heads")
    return {
        "n_layers": config.integer(f"{which}_layers"),
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": even_head_dim(config, config.integer("d_model"), heads),
        "ffn_hidden": config.integer(f"{which}_ffn_dim"),
    }


@family("whisper", "WhisperForConditionalGeneration", encodes=True)
def whisper(config: Fields) -> Values:
    """Reads Whisper: an encoder of 30 s of sound, and a decoder that attends to it."""
    encoder = replace(whisper_encoder(config, mel_bins=80), joins="attention")
    return _halves(config, "decoder") | {
        "hidden": config.integer("d_model"),
        "vocab": config.integer("vocab_size"),
        "mlp": PLAIN[config.text("activation_function", "gelu", PLAIN)],
        "norm": "layernorm",
        "position": "learned",
        "max_positions": config.integer("max_target_positions", 448),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "key_bias": False,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias"), True),
        "cross_attention": "behind",
        "encoder": encoder,
    }
