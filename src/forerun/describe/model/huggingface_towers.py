"""Reads the stack of a tower of images or sounds in a config.json: `vision_config` or `audio_config`.

Stacks are known by their own model_type. Keys and defaults follow the configuration class in Hugging Face transformers.
The projectors behind them are in huggingface_projectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forerun.describe.model.encoder import EncoderSpec
from forerun.describe.model.families import Values
from forerun.describe.model.fields import LARGEST, Fields
from forerun.describe.model.layer_lists import each_layer
from forerun.describe.model.spec import ModelSpec
from forerun.describe.model.spec_file import even_head_dim

Tower = EncoderSpec[ModelSpec]
_ALL_BIASES: Values = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias"), True)
_IMAGE_SIDE = 896
"""pixels of a side of an image where files state no size, as models of this kind take images as they are"""
_NORMS = {"rms_norm": "rmsnorm", "layer_norm": "layernorm"}
_TAPS = 3
"""taps of Whisper's convolutions over time"""


_Sizes = tuple[int, int, int, int]
"""width, layers, heads, width of the feed-forward"""


def _stack(section: Fields, sizes: _Sizes, *values: Values) -> ModelSpec:
    """Returns the stack of a tower; `values` are further fields of ModelSpec."""
    hidden, layers, heads, ffn = sizes
    shape = {"n_layers": layers, "hidden": hidden, "n_heads": heads, "n_kv_heads": heads, "ffn_hidden": ffn}
    common: Values = {"mlp": "gelu", "norm": "layernorm", "position": "none", "causal": False, "vocab": 1}
    given: Values = shape | common
    for each in values:
        given |= each
    given["head_dim"] = given.get("head_dim") or even_head_dim(section, hidden, heads)
    return ModelSpec(name="encoder", **given)  # type: ignore[arg-type]


def _learned(rows: int) -> Values:
    return {"position": "learned", "max_positions": rows}


def _sizes(section: Fields, hidden: int, layers: int, heads: int, ffn: int) -> _Sizes:
    """Reads width, layers, heads and feed-forward under their usual keys; the arguments are their defaults."""
    return (
        section.integer("hidden_size", hidden),
        section.integer("num_hidden_layers", layers),
        section.integer("num_attention_heads", heads),
        section.integer("intermediate_size", ffn),
    )


def _side(section: Fields, key: str, default: int) -> int:
    """Reads the pixels of a side, which some files state for both sides."""
    return whole_numbers(section, key)[0] if section.is_list(key) else section.integer(key, default)


def whole_numbers(section: Fields, key: str) -> list[int]:
    """Reads a list of whole numbers from 1 on; empty if the key is not stated."""
    found = [item for item in section.items(key) if isinstance(item, int) and 1 <= item <= LARGEST]
    if len(found) < len(section.items(key)) or (section.is_list(key) and not found):
        raise section.error(key, "must be a list of whole numbers from 1 on")
    return found


def _patches(section: Fields, image: int, patch: int) -> tuple[int, int]:
    """Returns the patches of an image and the elements of a patch; the arguments are the defaults of their sides."""
    side = _side(section, "patch_size", patch)
    rows = _side(section, "image_size", image) // side
    return rows * rows, section.integer("num_channels", 3) * side * side


def _clip(section: Fields) -> Tower:
    """Reads CLIP: a class token, and norms behind the embedding and behind the last layer."""
    return _with_class_token(section, *_patches(section, 224, 32), default=(768, 12, 12, 3072))


def _llama4(section: Fields) -> Tower:
    """Reads the tower of Llama 4: CLIP with rotary positions besides the learned ones."""
    return _with_class_token(section, *_patches(section, 448, 14), default=(768, 34, 16, 5632))


def _with_class_token(section: Fields, tokens: int, pixels: int, default: _Sizes) -> Tower:
    """Returns a tower with a class token, learned positions, and biases everywhere but in its stem."""
    norm: Values = {"embedding_norm": True}
    stack = _stack(section, _sizes(section, *default), _ALL_BIASES, _learned(tokens + 1), norm)
    stem, own = ((pixels, stack.hidden),), stack.hidden
    return EncoderSpec(stack, tokens + 1, extra_tokens=1, stem=stem, stem_bias=False, other_parameters=own)


def _siglip(section: Fields) -> Tower:
    """Reads SigLIP: no class token; a head that pools the patches, which a language model doesn't read."""
    tokens, pixels = _patches(section, 224, 16)
    tower = _of_patches(section, section.integer("num_patches", tokens), pixels)
    if not section.flag("vision_use_head", True):
        return tower
    hidden, ffn = tower.stack.hidden, tower.stack.ffn_hidden
    head = 4 * hidden * hidden + 7 * hidden + 2 * hidden * ffn + ffn + hidden
    return replace(tower, other_parameters=head)


def _idefics3(section: Fields) -> Tower:
    """Reads the tower of Idefics 3 and SmolVLM: SigLIP without its head."""
    return _of_patches(section, *_patches(section, 224, 32), default=(1152, 12, 16, 3072))


def _of_patches(section: Fields, tokens: int, pixels: int, default: _Sizes = (768, 12, 12, 3072)) -> Tower:
    """Returns a tower with learned positions and biases everywhere."""
    stack = _stack(section, _sizes(section, *default), _ALL_BIASES, _learned(tokens))
    return EncoderSpec(stack, tokens, stem=((pixels, stack.hidden),))


def _pixtral(section: Fields) -> Tower:
    """Reads Pixtral: a decoder's layers without a mask, on images up to the stated size."""
    tokens, pixels = _patches(section, 1024, 16)
    layer: Values = {"mlp": "geglu", "norm": "rmsnorm", "position": "rope"}
    ends: Values = {"embedding_norm": True, "final_norm": False, "head_dim": section.integer("head_dim", 0, least=0)}
    stack = _stack(section, _sizes(section, 1024, 24, 16, 4096), layer, ends)
    return EncoderSpec(stack, tokens, stem=((pixels, stack.hidden),), stem_bias=False)


def _qwen_patches(section: Fields, patch: int) -> tuple[int, int]:
    """Returns the patches of an image of `_IMAGE_SIDE` and the elements of a patch over two frames."""
    side = section.integer("patch_size", patch)
    channels = section.integer(section.first_of("in_channels", "in_chans"), 3)
    rows = _IMAGE_SIDE // side
    return rows * rows, channels * section.integer("temporal_patch_size", 2) * side * side


def _qwen2_vl(section: Fields) -> Tower:
    """Reads the tower of Qwen2-VL."""
    tokens, pixels = _qwen_patches(section, 14)
    hidden = section.integer("embed_dim", 1280)
    layers, heads, ratio = (section.integer(*known) for known in (("depth", 32), ("num_heads", 16), ("mlp_ratio", 4)))
    own: Values = {"position": "rope", "final_norm": False}
    stack = _stack(section, (hidden, layers, heads, hidden * ratio), _ALL_BIASES, own)
    return EncoderSpec(stack, tokens, stem=((pixels, hidden),), stem_bias=False)


def _qwen2_5_vl(section: Fields) -> Tower:
    """Reads the tower of Qwen2.5-VL: all layers but a few attend within windows."""
    tokens, pixels = _qwen_patches(section, 14)
    layers, hidden = section.integer("depth", 32), section.integer("hidden_size", 3584)
    window = (section.integer("window_size", 112) // section.integer("patch_size", 14)) ** 2
    full = section.items("fullatt_block_indexes") or [7, 15, 23, 31]
    sizes = hidden, layers, section.integer("num_heads", 16), section.integer("intermediate_size", 3420)
    own: Values = {"mlp": "swiglu", "norm": "rmsnorm", "position": "rope", "final_norm": False}
    windows = each_layer([{"attention_chunk": None if layer in full else window} for layer in range(layers)])
    stack = _stack(section, sizes, _ALL_BIASES, own, windows)
    return EncoderSpec(stack, tokens, stem=((pixels, hidden),), stem_bias=False)


def _qwen3_vl(section: Fields) -> Tower:
    """Reads the tower of Qwen3-VL and Qwen 3.5."""
    tokens, pixels = _qwen_patches(section, 16)
    hidden = section.integer("hidden_size", 1152)
    layers, heads, ffn = (
        section.integer(*known) for known in (("depth", 27), ("num_heads", 16), ("intermediate_size", 4304))
    )
    rows = section.integer("num_position_embeddings", 2304)
    stack = _stack(section, (hidden, layers, heads, ffn), _ALL_BIASES, _learned(rows), {"final_norm": False})
    return EncoderSpec(stack, tokens, stem=((pixels, hidden),))


def _glm4v(section: Fields) -> Tower:
    """Reads the tower of GLM-4V: gated layers as wide as the language model, and a norm behind the patches."""
    tokens, pixels = _patches(section, 336, 14)
    hidden, bias = section.integer("hidden_size", 1536), section.flag("attention_bias")
    layers, heads = section.integer("depth", 24), section.integer("num_heads", 12)
    sizes = hidden, layers, heads, section.integer("out_hidden_size", 4096)
    own: Values = {"mlp": "swiglu", "norm": "rmsnorm", "embedding_norm": True, "qkv_bias": bias}
    pixels *= section.integer("temporal_patch_size", 2)
    stack = _stack(section, sizes, own, _learned(tokens))
    return EncoderSpec(stack, tokens, stem=((pixels, hidden),))


def _internvl(section: Fields) -> Tower:
    """Reads InternViT: a class token, and a scale for each half of a layer."""
    tokens, pixels = _patches(section, 448, 14)
    sizes = _sizes(section, 1024, 24, 16, 4096)
    own: Values = {
        "qkv_bias": section.flag("attention_bias"),
        "norm": _NORMS[section.text("norm_type", "layer_norm", _NORMS)],
        "qk_norm": section.flag("use_qk_norm"),
        "qk_norm_over": "all_heads",
        "final_norm": not section.flag("use_mean_pooling", True),
        "other_parameters": 2 * sizes[0],
    }
    stack = _stack(section, sizes, _ALL_BIASES, _learned(tokens + 1), own)
    stem = ((pixels, stack.hidden),)
    return EncoderSpec(stack, tokens + 1, extra_tokens=1, stem=stem, other_parameters=stack.hidden)


def _mllama(section: Fields) -> Tower:
    """Reads the tower of Llama 3.2 Vision: tiles of an image attend to each other, behind tables for their places; the
    last layers have gates."""
    tokens, pixels = _patches(section, 448, 14)
    tokens, tiles = tokens + 1, section.integer("max_num_tiles", 4)
    places = len(section.items("supported_aspect_ratios") or range(8)) + 1
    layers, gated = section.integer("num_hidden_layers", 32), section.integer("num_global_layers", 8)
    heads = section.integer(section.first_of("attention_heads", "num_attention_heads"), 16)
    hidden, ffn = section.integer("hidden_size", 1280), section.integer("intermediate_size", 5120)
    own: Values = {"mlp_bias": True, "norm_bias": True, "embedding_norm": True}
    gates = each_layer([{"other_parameters": 0}] * layers + [{"other_parameters": 2}] * gated)
    stack = _stack(section, (hidden, layers + gated, heads, ffn), own, _learned(tokens), gates)
    tables = hidden + places * tiles * hidden * (tokens + 2) + 3
    stem = ((pixels, hidden),)
    return EncoderSpec(stack, tiles * tokens, joins="attention", stem=stem, stem_bias=False, other_parameters=tables)


def _kimi(section: Fields) -> Tower:
    """Reads the tower of Kimi K2.5 (MoonViT): a table of positions for rows and columns."""
    side = section.integer("patch_size", 14)
    rows = section.integer("pos_emb_height", 64) * section.integer("pos_emb_width", 64)
    stack = _stack(section, _sizes(section, 1152, 27, 16, 4304), _ALL_BIASES, _learned(rows))
    return EncoderSpec(stack, (_IMAGE_SIDE // side) ** 2, stem=((3 * side * side, stack.hidden),))


def whisper_encoder(section: Fields, mel_bins: int = 128) -> Tower:
    """Reads Whisper's encoder, under either set of keys: 30 s of sound behind two convolutions, the second one of
    stride 2. `mel_bins` is the default of `num_mel_bins`."""
    frames, bins = section.integer("max_source_positions", 1500), section.integer("num_mel_bins", mel_bins)
    hidden = section.integer(section.first_of("d_model", "hidden_size"), 1280)
    sizes = (
        hidden,
        section.integer(section.first_of("encoder_layers", "num_hidden_layers"), 32),
        section.integer(section.first_of("encoder_attention_heads", "num_attention_heads"), 20),
        section.integer(section.first_of("encoder_ffn_dim", "intermediate_size"), 5120),
    )
    stack = _stack(section, sizes, _ALL_BIASES, {"key_bias": False}, _learned(frames))
    stem = ((_TAPS * bins, hidden), (_TAPS * hidden, hidden))
    return EncoderSpec(stack, frames, "sounds", stem=stem, stem_rows=2, stem_activation=True)


STACKS: dict[str, Callable[[Fields], Tower]] = {
    "clip_vision_model": _clip,
    "glm4v_moe_vision": _glm4v,
    "glm4v_vision": _glm4v,
    "idefics3_vision": _idefics3,
    "internvl_vision": _internvl,
    "kimi_k25_vision": _kimi,
    "llama4_vision_model": _llama4,
    "mllama_vision_model": _mllama,
    "pixtral": _pixtral,
    "qwen2_5_vl_vision": _qwen2_5_vl,
    "qwen2_audio_encoder": whisper_encoder,
    "qwen2_vl_vision": _qwen2_vl,
    "qwen3_vl_vision": _qwen3_vl,
    "siglip2_vision_model": _siglip,
    "siglip_vision_model": _siglip,
    "voxtral_encoder": whisper_encoder,
}
"""model_type of a tower -> the reader of its stack"""
