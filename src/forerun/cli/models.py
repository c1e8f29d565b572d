"""`forerun models`: the model presets."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from forerun.model.catalog import model_table
from forerun.report.console import console, print_models
from forerun.report.records import to_json


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the model presets."""
    rows = model_table()
    if as_json:
        print(to_json({"models": [asdict(row) for row in rows]}))
    else:
        print_models(console(), rows)
