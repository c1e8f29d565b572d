"""Sets the inputs that each sample has for the encoder of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.common.errors import ForerunError
from forerun.describe.model.spec import ModelSpec


@dataclass(frozen=True)
class TrainedWith:
    """What a user states beside a model: None and False change nothing."""

    mtp_modules: int | None = None
    """number of modules for multi-token prediction"""
    images: int | None = None
    """number of images or sounds of each sequence"""
    encoder_seq_len: int | None = None
    """number of tokens of each input of the encoder"""
    freeze_encoder: bool = False

    def applied(self, model: ModelSpec) -> ModelSpec:
        """Returns `model` with these values. Raises ForerunError for a model that can't be trained so."""
        if self.mtp_modules is not None:
            model = replace(model, mtp_modules=self.mtp_modules)
        of_encoder = self.images, self.encoder_seq_len, self.freeze_encoder
        return model if of_encoder == (None, None, False) else with_inputs(model, *of_encoder)


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
