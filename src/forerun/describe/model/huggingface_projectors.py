"""Reads the projector between a tower of images or sounds and the language model in a config.json, with the tower.

Projectors are known by the model_type of the whole file. Keys and defaults follow the configuration class in Hugging
Face transformers. Towers and projectors that are not known are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_towers import STACKS, Tower, whole_numbers


def tower_of(config: Fields, model_type: str, hidden: int) -> Tower | None:
    """Returns the tower of the file of a `model_type`, whose language model has the width `hidden`; None if nothing
    here reads it. Samples have no inputs for it, but for one if layers of the language model read nothing else."""
    known = _PROJECTORS.get(model_type)
    section = config.section("vision_config") or config.section("audio_config")
    if known is None or section is None:
        return None
    stated = section.text("model_type", known.usual)
    read = STACKS.get(stated) or STACKS.get(known.usual)
    if read is None or config.is_list("vision_feature_layer"):
        return None
    tower = known.read(config, section, read(section), hidden)
    return replace(tower, inputs=int(tower.joins == "attention"))


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
    sides = whole_numbers(section, "merge_kernel_size") or [2, 2]
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
