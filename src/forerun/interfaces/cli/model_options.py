"""Options that change the model: modules for multi-token prediction, images or sounds of a sequence."""

from __future__ import annotations

from typing import Annotated, Protocol, TypeVar, cast

import typer

from forerun.common.errors import ForerunError, at
from forerun.describe.model.inputs import MOST_IMAGES, MOST_MTP_MODULES, trained_with
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec

MtpModules = Annotated[
    int | None,
    typer.Option(
        "--mtp",
        metavar="N",
        min=0,
        max=MOST_MTP_MODULES,
        help=(
            "Number of multi-token prediction modules to train with the model. Each has a layer and uses the"
            " head once more (default: none, unless a YAML file or a recipe has some)."
        ),
    ),
]
Images = Annotated[
    int | None,
    typer.Option(
        "--images",
        metavar="N",
        min=0,
        max=MOST_IMAGES,
        help=(
            "Number of images (or sounds) in each sequence, for a model with a tower for them. Their tokens"
            " count as part of --seq-len. Without images only the language model is trained, without its"
            " tower (default: 0)."
        ),
    ),
]
EncoderSeqLen = Annotated[
    int | None,
    typer.Option(
        "--encoder-seq-len",
        metavar="N",
        min=1,
        max=10_000_000,
        help=(
            "Number of tokens of each input of an encoder: tokens of a source text, patches of an image,"
            " frames of a sound (default: that of the model's file)."
        ),
    ),
]
FreezeEncoder = Annotated[
    bool, typer.Option("--freeze-encoder", help="Freeze the tower or the encoder, and train only the layers behind it.")
]
Model = TypeVar("Model", bound=ModelSpec | LayeredModel)


class _Options(Protocol):
    """The options of a command that change its model."""

    @property
    def mtp(self) -> int | None: ...
    @property
    def images(self) -> int | None: ...
    @property
    def encoder_seq_len(self) -> int | None: ...
    @property
    def freeze_encoder(self) -> bool: ...


def given_of_model(options: _Options) -> dict[str, object]:
    """Returns the options that are given, by their name on the command line."""
    values = {
        "--mtp": options.mtp,
        "--images": options.images,
        "--encoder-seq-len": options.encoder_seq_len,
        "--freeze-encoder": options.freeze_encoder or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def as_asked(model: Model, options: _Options) -> Model:
    """Returns `model` with the changes of the options. Without options it stays as it is.

    Raises ForerunError for a model that can't be changed so.
    """
    given = given_of_model(options)
    if not given:
        return model
    name, value = next(iter(given.items()))
    if isinstance(model, LayeredModel):
        raise ForerunError(f"{name} {value}: {model.name} is given layer by layer; choose a transformer")
    stated = options.mtp, options.images, options.encoder_seq_len, options.freeze_encoder
    with at(" ".join(name if value is True else f"{name} {value}" for name, value in given.items())):
        return cast("Model", trained_with(model, *stated))
