"""The option of commands that trains a model to predict more than the next token."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, TypeVar

import typer

from forerun.common.errors import ForerunError, at
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec

MtpModules = Annotated[
    int | None,
    typer.Option(
        "--mtp",
        metavar="N",
        min=0,
        max=16,
        help="Modules for multi-token prediction to train with the model, each a layer and a further use of the head"
        " (default: none, unless a YAML file or a recipe has some).",
    ),
]
Model = TypeVar("Model", bound=ModelSpec | LayeredModel)


def with_modules(model: Model, modules: int | None) -> Model:
    """Returns `model` with so many modules that predict further tokens; as it is where None is given.

    Raises ForerunError for a model that can't have them.
    """
    if modules is None:
        return model
    if isinstance(model, LayeredModel):
        raise ForerunError(f"--mtp {modules}: {model.name} is given layer by layer; choose a transformer")
    with at(f"--mtp {modules}"):
        return replace(model, mtp_modules=modules)
