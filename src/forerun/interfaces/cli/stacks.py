"""`forerun stacks`: the software stacks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from forerun.describe.stacks.catalog import load_stack, stack_names
from forerun.interfaces.report.console import print_stacks
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json


def stacks(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names of stacks, or files of your own stacks; by default all stacks."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the software stacks: the training frameworks and their settings that Forerun knows."""
    found = [load_stack(name) for name in names or stack_names()]
    if as_json:
        print(to_json({"stacks": [asdict(stack) for stack in found]}))
    else:
        print_stacks(console(), found)
