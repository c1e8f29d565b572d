"""The option that writes a page, and the command line that the page shows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from forerun.common.errors import ForerunError

NAME = "--report"
_PLACES = (NAME, "--out", "--pictures", "--launch", "--launch-out")
"""options that name output files and change nothing in the page"""
Report = Annotated[
    Path | None,
    typer.Option(NAME, metavar="FILE", help="Write a page of figures, plots and what-if to this HTML file."),
]


def check_report(path: Path | None) -> None:
    """Raise ForerunError for a page that could not be written after all the work."""
    if path is not None:
        check_output(path)


def check_output(path: Path | None) -> None:
    """Raise ForerunError for a file that could not be written after all the work."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ForerunError(f"{path}: can't be written: there is no folder {path.parent}")
    if path.is_dir():
        raise ForerunError(f"{path}: can't be written: it is a folder")


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
