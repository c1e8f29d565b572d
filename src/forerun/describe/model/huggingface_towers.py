"""Reads the tower of images or sounds in a config.json: `vision_config` or `audio_config`, and the projector behind it.

The stacks of towers are known by their own model_type, the projectors by that of the whole file. A key, and its
absence, mean what the configuration class in Hugging Face transformers says. Other towers are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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


def tower_of(config: Fields, model_type: str, hidden: int) -> Tower | None:
    """Returns the tower of the file of a `model_type`, whose language model has the width `hidden`; None where nothing
    here reads it. Samples have no inputs for it, but for one if layers of the language model read nothing else."""
    known = _PROJECTORS.get(model_type)
    section = config.section("vision_config") or config.section("audio_config")
    if known is None or section is None:
        return None
    stated = section.text("model_type", known.usual)
    read = _STACKS.get(stated) or _STACKS.get(known.usual)
    if read is None or config.is_list("vision_feature_layer"):
        return None
    tower = known.read(config, section, read(section), hidden)
    return replace(tower, inputs=int(tower.joins == "attention"))


# -- stacks ----------------------------------------------------------------------------------------------------------


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
    return _whole_numbers(section, key)[0] if section.is_list(key) else section.integer(key, default)


def _whole_numbers(section: Fields, key: str) -> list[int]:
    """Reads a list of whole numbers from 1 on; empty where the key is not stated."""
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


def _whisper(section: Fields) -> Tower:
    """Reads Whisper's encoder, under either set of keys: 30 s of sound behind two convolutions."""
    frames, bins = section.integer("max_source_positions", 1500), section.integer("num_mel_bins", 128)
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


_STACKS: dict[str, Callable[[Fields], Tower]] = {
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
    "qwen2_audio_encoder": _whisper,
    "qwen2_vl_vision": _qwen2_vl,
    "qwen3_vl_vision": _qwen3_vl,
    "siglip2_vision_model": _siglip,
    "siglip_vision_model": _siglip,
    "voxtral_encoder": _whisper,
}
"""model_type of a tower -> the reader of its stack"""

# -- projectors ------------------------------------------------------------------------------------------------------

Projects = Callable[[Fields, Fields, Tower, int], Tower]
"""adds a projector to a tower: reads the whole file and the tower's section, and takes the language model's width"""


@dataclass(frozen=True)
class _Projector:
    """The projector of one model_type."""

    usual: str
    """model_type of the tower in files that don't say it"""
    read: Projects


def _two_products(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads LLaVA's projector."""
    bias = config.flag("multimodal_projector_bias", True)
    whole = config.text("vision_feature_select_strategy", "default") == "full"
    products = ((tower.stack.hidden, hidden), (hidden, hidden))
    extra = 0 if whole else tower.extra_tokens
    return replace(tower, projector=products, projector_bias=bias, extra_tokens=extra)


def _two_products_and_a_newline(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of LLaVA-NeXT, which also has a vector for the end of a row of patches."""
    tower = _two_products(config, section, tower, hidden)
    return replace(tower, other_parameters=tower.other_parameters + hidden)


def _mistral3(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of Mistral 3: a norm, a product that joins patches, and two more."""
    side, width = config.integer("spatial_merge_size", 2), tower.stack.hidden
    config.expect("multimodal_projector_bias", False)
    products = ((width * side * side, width), (width, hidden), (hidden, hidden))
    return replace(tower, merge=side * side, projector=products, projector_bias=False, projector_norm=width)


def _gemma3(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of Gemma 3, which takes means of patches."""
    merge = tower.tokens // config.integer("mm_tokens_per_image", 256)
    width = tower.stack.hidden
    return replace(tower, merge=max(1, merge), projector=((width, hidden),), projector_bias=False, projector_norm=width)


def _paligemma(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of PaliGemma."""
    return replace(tower, projector=((tower.stack.hidden, hidden),))


def _qwen(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of the Qwen-VL family, and those of Qwen3-VL that read layers in the middle."""
    joined = section.integer("spatial_merge_size", 2) ** 2
    wide = tower.stack.hidden * joined
    made = section.integer("hidden_size" if section.present("embed_dim") else "out_hidden_size", hidden)
    further = len(section.items("deepstack_visual_indexes"))
    norms = further * 2 * (wide - tower.stack.hidden)  # those of further projectors are as wide as what they join
    return replace(
        tower,
        merge=joined,
        projector=((wide, wide), (wide, made)),
        projector_norm=tower.stack.hidden,
        projector_norm_bias=tower.stack.norm == "layernorm",
        projectors=1 + further,
        other_parameters=tower.other_parameters + norms,
    )


def _glm4v_projector(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of GLM-4V: a product that joins patches, one with a norm, and a gated feed-forward."""
    joined, inside = section.integer("spatial_merge_size", 2) ** 2, section.integer("intermediate_size", 13696)
    products = ((tower.stack.hidden * joined, hidden), (hidden, hidden), (hidden, 2 * inside), (inside, hidden))
    own = tower.other_parameters + 3 * hidden  # the first product's bias, and the norm
    return replace(tower, merge=joined, projector=products, projector_bias=False, other_parameters=own)


def _internvl_projector(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of InternVL."""
    joined = round(1 / (config.number("downsample_ratio") or 0.5)) ** 2
    wide = tower.stack.hidden * joined
    products = ((wide, hidden), (hidden, hidden))
    return replace(tower, merge=joined, projector=products, projector_norm=wide, projector_norm_bias=True)


def _llama4_projector(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of Llama 4: two products of its adapter, and one more."""
    joined = round(1 / (section.number("pixel_shuffle_ratio") or 0.5)) ** 2
    inside, made = section.integer("projector_input_dim", 4096), section.integer("projector_output_dim", 4096)
    read = section.integer("vision_output_dim", 7680)
    products = ((tower.stack.ffn_hidden, inside), (inside, made), (read, hidden))
    return replace(tower, merge=joined, projector=products, projector_bias=False)


def _idefics3_projector(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of Idefics 3 and SmolVLM: one product of joined patches."""
    joined = config.integer("scale_factor", 2) ** 2
    return replace(tower, merge=joined, projector=((tower.stack.hidden * joined, hidden),), projector_bias=False)


def _cohere(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of Command A Vision: a gated product of joined patches, and one more."""
    joined = config.integer("downsample_factor", 2) ** 2
    inside = config.integer("alignment_intermediate_size", 36864) // 2
    products = ((tower.stack.hidden * joined, inside), (inside, hidden))
    return replace(tower, merge=joined, projector=products, projector_gated=True)


def _lfm2(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of LFM2-VL."""
    joined = config.integer("downsample_factor", 2) ** 2
    wide, inside = tower.stack.hidden * joined, config.integer("projector_hidden_size", 2560)
    return replace(
        tower,
        merge=joined,
        projector=((wide, inside), (inside, hidden)),
        projector_bias=config.flag("projector_bias", True),
        projector_norm=wide if config.flag("projector_use_layernorm", True) else 0,
        projector_norm_bias=True,
    )


def _kimi_projector(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of Kimi K2.5."""
    sides = _whole_numbers(section, "merge_kernel_size") or [2, 2]
    joined = sides[0] * sides[-1]
    wide = tower.stack.hidden * joined
    products = ((wide, wide), (wide, hidden))
    norm = tower.stack.hidden
    return replace(tower, merge=joined, projector=products, projector_norm=norm, projector_norm_bias=True)


def _mllama_projector(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of Llama 3.2 Vision: one product of the outputs of several layers. The language model's table
    has eight rows more than its vocabulary."""
    read = section.integer("vision_output_dim", 7680)
    return replace(tower, projector=((read, hidden),), other_parameters=tower.other_parameters + 8 * hidden)


def _qwen2_audio(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of Qwen2-Audio, which takes means of two frames."""
    return replace(tower, merge=2, projector=((tower.stack.hidden, hidden),))


def _voxtral(config: Fields, section: Fields, tower: Tower, hidden: int) -> Tower:
    """Reads the projector of Voxtral, which joins four frames."""
    wide = tower.stack.ffn_hidden
    products = ((wide, hidden), (hidden, hidden))
    return replace(tower, merge=wide // tower.stack.hidden, projector=products, projector_bias=False)


_PROJECTORS: dict[str, _Projector] = {
    "cohere2_vision": _Projector("siglip_vision_model", _cohere),
    "gemma3": _Projector("siglip_vision_model", _gemma3),
    "glm4v": _Projector("glm4v_vision", _glm4v_projector),
    "glm4v_moe": _Projector("glm4v_vision", _glm4v_projector),
    "idefics3": _Projector("idefics3_vision", _idefics3_projector),
    "internvl": _Projector("internvl_vision", _internvl_projector),
    "kimi_k25": _Projector("kimi_k25_vision", _kimi_projector),
    "lfm2_vl": _Projector("siglip2_vision_model", _lfm2),
    "llama4": _Projector("llama4_vision_model", _llama4_projector),
    "llava": _Projector("clip_vision_model", _two_products),
    "llava_next": _Projector("clip_vision_model", _two_products_and_a_newline),
    "llava_onevision": _Projector("siglip_vision_model", _two_products_and_a_newline),
    "mistral3": _Projector("pixtral", _mistral3),
    "mllama": _Projector("mllama_vision_model", _mllama_projector),
    "paligemma": _Projector("siglip_vision_model", _paligemma),
    "qwen2_5_vl": _Projector("qwen2_5_vl_vision", _qwen),
    "qwen2_audio": _Projector("qwen2_audio_encoder", _qwen2_audio),
    "qwen2_vl": _Projector("qwen2_vl_vision", _qwen),
    "qwen3_5": _Projector("qwen3_vl_vision", _qwen),
    "qwen3_5_moe": _Projector("qwen3_vl_vision", _qwen),
    "qwen3_vl": _Projector("qwen3_vl_vision", _qwen),
    "qwen3_vl_moe": _Projector("qwen3_vl_vision", _qwen),
    "smolvlm": _Projector("idefics3_vision", _idefics3_projector),
    "voxtral": _Projector("voxtral_encoder", _voxtral),
}
"""model_type of a file with a tower -> its projector"""
