"""Sets what a user states beside a model: the inputs of its encoder, and modules for multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

from forerun.common.errors import ForerunError
from forerun.describe.model.spec import ModelSpec

MOST_IMAGES = 4096
"""images of a sequence that a user may state"""
MOST_MTP_MODULES = 16
"""modules for multi-token prediction that a user may state"""


def trained_with(
    spec: ModelSpec,
    mtp_modules: int | None = None,
    images: int | None = None,
    encoder_seq_len: int | None = None,
    freeze_encoder: bool = False,
) -> ModelSpec:
    """Returns `spec` with the values that a user states beside a model; None and False change nothing.

    `mtp_modules` is the number of modules for multi-token prediction. The other values are those of `with_inputs`.

    Raises ForerunError for a model that can't be trained so.
    """
    if mtp_modules is not None:
        spec = replace(spec, mtp_modules=mtp_modules)
    of_encoder = images, encoder_seq_len, freeze_encoder
    return spec if of_encoder == (None, None, False) else with_inputs(spec, *of_encoder)


def with_inputs(
    spec: ModelSpec, inputs: int | None = None, tokens: int | None = None, frozen: bool = False
) -> ModelSpec:
    """Returns `spec` on samples with so many `inputs` for its encoder (images or sounds), of so many `tokens` each.

    `tokens` are patches of an image, frames of a sound or tokens of a source text; None keeps the model's own number.
    With `frozen` the encoder is not trained.

    Raises ForerunError for a model without an encoder, for images of one that reads a text, and for tokens that no
    sample would have.
    """
    encoder = spec.encoder
    if encoder is None:
        raise ForerunError(f"model {spec.name} has neither a tower nor an encoder")
    if inputs is not None and encoder.reads == "text":
        raise ForerunError(f"model {spec.name} encodes one text for each sample, not images")
    inputs = encoder.inputs if inputs is None else inputs
    if not inputs and (tokens is not None or frozen):
        raise ForerunError(f"model {spec.name} has no images to encode; state a number of images too")
    whole = encoder.tokens if tokens is None else tokens + encoder.extra_tokens
    return replace(spec, encoder=replace(encoder, inputs=inputs, tokens=whole, frozen=encoder.frozen or frozen))


def unused_encoder(spec: ModelSpec) -> tuple[str, ...]:
    """Returns a sentence about the encoder of `spec` if samples have no inputs for it."""
    if spec.encoder is None or spec.runs is not None:
        return ()
    reads = spec.encoder.reads
    return (f"{spec.name}: the language model alone; --images N trains it with its tower on N {reads} a sequence",)
