"""`forerun clusters`: the cluster presets."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from forerun.describe.cluster.catalog import cluster_table
from forerun.interfaces.report.console import print_clusters
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json


def clusters(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the cluster presets."""
    rows = cluster_table()
    if as_json:
        print(to_json({"clusters": [asdict(row) for row in rows]}))
    else:
        print_clusters(console(), rows)
