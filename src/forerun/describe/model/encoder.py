"""EncoderSpec: a second stack of layers, whose output the layers of a language model read.

An encoder-decoder (T5, Whisper) encodes a source text or sound, and the layers of its decoder attend to the result. A
tower of images or sounds (LLaVA, Qwen-VL) encodes each image, and the result takes the place of tokens of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from forerun.common.errors import ForerunError

Layers = TypeVar("Layers")
"""ModelSpec, which has an encoder as one of its fields"""
Reads = Literal["text", "images", "sounds"]
Joins = Literal["sequence", "attention"]


@dataclass(frozen=True, slots=True)
class EncoderSpec(Generic[Layers]):
    """An encoder and the projector behind it. Widths are in elements, `tokens` counts those of one input."""

    stack: Layers
    """the layers as a model of their own. Its position table, embedding norm and final norm belong to the encoder; its
    vocabulary and head don't exist"""
    tokens: int
    """tokens of one input inside the encoder: of a source text, patches of an image, frames of a sound"""
    reads: Reads = "images"
    joins: Joins = "sequence"
    """whether the output takes the place of tokens of the sequence, or layers attend to it (`cross_attention`)"""
    inputs: int = 1
    """texts, images or sounds of each sample; 0: samples have none, and the encoder is left out"""
    extra_tokens: int = 0
    """tokens of an input that the projector drops (CLIP's class token)"""
    merge: int = 1
    """tokens of the encoder that make one token of its output"""
    stem: tuple[tuple[int, int], ...] = ()
    """(columns that are read, rows that are made) of the products that make a token from pixels or samples"""
    stem_rows: int = 1
    """rows of the first product of the stem for each token (a convolution behind it has a stride)"""
    stem_bias: bool = True
    stem_activation: bool = False
    """an activation behind each product of the stem (Whisper)"""
    projector: tuple[tuple[int, int], ...] = ()
    """(columns that are read, rows that are made) of the products that make a token of the output, with an activation
    between each two; the first one reads `merge` tokens side by side, or their mean"""
    projector_gated: bool = False
    """the first product has a gate of its size beside it"""
    projector_bias: bool = True
    projector_norm: int = 0
    """width of a norm before the projector; 0: there is none"""
    projector_norm_bias: bool = False
    projectors: int = 1
    """projectors of this size: further ones read layers in the middle (Qwen3-VL's DeepStack)"""
    other_parameters: int = 0
    """trained elements beyond those of the parts above, such as class tokens and tables of relative positions"""
    frozen: bool = False
    """the stack and its stem are not trained; the projector is"""

    def __post_init__(self) -> None:
        for key in ("tokens", "merge", "stem_rows", "projectors"):
            if getattr(self, key) < 1:
                raise ForerunError(f"encoder: {key} must be at least 1, got {getattr(self, key)}")
        for key in ("inputs", "extra_tokens", "projector_norm", "other_parameters"):
            if getattr(self, key) < 0:
                raise ForerunError(f"encoder: {key} must be at least 0, got {getattr(self, key)}")
        if self.tokens - self.extra_tokens < self.merge:
            raise ForerunError(
                f"encoder: {self.tokens} tokens, {self.extra_tokens} of them dropped, leave none of which {self.merge}"
                " make one"
            )
        if self.reads == "text" and (self.joins != "attention" or self.inputs != 1 or self.stem):
            raise ForerunError("encoder: one that reads text needs joins: attention, inputs: 1 and no stem")

    @property
    def out_tokens(self) -> int:
        """Returns the tokens of the output for all inputs of a sample."""
        return self.inputs * ((self.tokens - self.extra_tokens) // self.merge)
