"""Options that name files to write. What can't be written is said before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from forerun.common.errors import ForerunError


def output_option(*names: str, help: str) -> Any:
    """Returns an option for a file to write, which is checked when the command line is read."""
    return typer.Option(*names, metavar="FILE", help=help, callback=check_output)


def check_output(path: Path | None) -> Path | None:
    """Returns the path. Raises ForerunError for a file that could not be written after all the work."""
    if path is None:
        return None
    if not path.absolute().parent.is_dir():
        raise ForerunError(f"{path}: can't be written: there is no folder {path.parent}; make it")
    if path.is_dir():
        raise ForerunError(f"{path}: can't be written: it is a folder")
    return path
