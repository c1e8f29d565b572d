"""Reads a recipe: finds out which tool's file it is, and hands it to the reader of that tool."""

from __future__ import annotations

from pathlib import Path

from forerun.common.admission import read_text
from forerun.common.errors import ForerunError
from forerun.describe.recipe.recipe import Recipe
from forerun.describe.recipe.torchtitan import read_torchtitan

_MOST_BYTES = 1 << 20
"""of a recipe; the longest ones of the tools have a hundredth of it"""


def read_recipe(path: Path) -> Recipe:
    """Returns what the recipe at `path` says. Nothing in it is run.

    Raises ForerunError, which names the file, for one that is unreadable, wrong, or of no tool whose files are read.
    """
    text = read_text(path, _MOST_BYTES)
    if path.suffix == ".toml":
        return read_torchtitan(text, path)
    raise ForerunError(f"{path}: a recipe is torchtitan's .toml; this file ends in {path.suffix or 'nothing'}")
