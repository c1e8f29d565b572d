"""`forerun models`: the model presets, or one model part by part."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_any, model_names, model_table
from forerun.describe.model.hub import download_config
from forerun.interfaces.cli import completion
from forerun.interfaces.report.console import print_models
from forerun.interfaces.report.layer_table import model_record, print_model
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Show this model part by part: a preset, a config.json or its folder, or a YAML file.",
            autocompletion=completion.models,
        ),
    ] = None,
    download: Annotated[
        bool,
        typer.Option(
            "--download",
            help="First download the config.json of org/model from the Hugging Face hub; a preset needs none.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the model presets, or the parts of one model with their parameters, FLOPs and activations."""
    if download and model is None:
        raise ForerunError("--download: name a model of the Hugging Face hub (forerun models org/model --download)")
    if model is not None:
        if download and model not in model_names():
            download_config(model)
        one = load_any(model)
        if as_json:
            print(to_json(model_record(one)))
        else:
            print_model(console(), one)
        return
    rows = model_table()
    if as_json:
        print(to_json({"models": [asdict(row) for row in rows]}))
    else:
        print_models(console(), rows)
