"""`--anchor`: steps that the user measured, which correct predictions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.describe.cluster.types import Cluster
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.evidence.fitting.anchor_file import anchored_by_file

Anchor = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="YAML file of steps that you measured (plan fields and step_time_s). They correct the prediction.",
    ),
]
SuggestAnchor = Annotated[
    bool,
    typer.Option(
        "--suggest-anchor",
        help="Name the listed plan whose measured step would correct the others best (see --anchor).",
    ),
]


def with_anchor(
    anchor: Path | None, model: ModelSpec | LayeredModel, cluster: Cluster, fields: Mapping[str, Any]
) -> Cluster:
    """Corrects `cluster` by the steps in the file `anchor`, if there is one; `fields` are those of the plan.

    Raises ForerunError as `anchored_by_file`.
    """
    if anchor is None:
        return cluster
    stack = fields.get("stack")
    return anchored_by_file(anchor, model, cluster, stack if isinstance(stack, str) else None)
