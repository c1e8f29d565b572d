"""The option that writes a page, and the command line that the page shows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from forerun.interfaces.cli.output_option import output_option

NAME = "--report"
_PLACES = (NAME, "--out", "--pictures", "--launch", "--launch-out")
"""options that name output files and change nothing in the page"""
Report = Annotated[
    Path | None,
    output_option(NAME, help="Write a page with figures, plots and what-if results to this HTML file."),
]


def typed(context: typer.Context) -> str:
    """Returns the command as the user typed it, without the options that name output files."""
    return typed_command(context.find_root().obj or ())


def typed_command(arguments: Sequence[str]) -> str:
    """Returns the command of `arguments` without the options that say where files go."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        place = argument in _PLACES
        if not skip and not place and not argument.startswith(tuple(f"{name}=" for name in _PLACES)):
            kept.append(argument)
        skip = place and not skip
    return shlex.join(["forerun", *kept])
