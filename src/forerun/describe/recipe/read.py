"""Reads a recipe: detects the tool of the file, and calls the reader for that tool."""

from __future__ import annotations

from pathlib import Path

from forerun.common.admission import read_text
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import parse_any_yaml
from forerun.describe.recipe.deepspeed import read_accelerate, read_deepspeed
from forerun.describe.recipe.megatron import read_arguments, read_script
from forerun.describe.recipe.recipe import Recipe
from forerun.describe.recipe.torchtitan import read_torchtitan

_MOST_BYTES = 1 << 20
"""of a recipe; the longest ones of the tools have a hundredth of it"""


def read_recipe(path: Path) -> Recipe:
    """Reads the recipe at `path`. Nothing in it is run.

    Raises ForerunError, which names the file, for one that is unreadable, wrong, or of no tool whose files are read.
    """
    text = read_text(path, _MOST_BYTES)
    if path.suffix == ".toml":
        return read_torchtitan(text, path)
    if path.suffix in (".sh", ".txt", ".args", ".slurm", ".sbatch"):
        return read_script(text, path)
    if path.suffix in (".yaml", ".yml"):
        data = parse_any_yaml(text, str(path))
        of_accelerate = isinstance(data, dict) and "distributed_type" in data
        return read_accelerate(data, path) if of_accelerate else read_arguments(data, path)
    if path.suffix == ".json":
        return read_deepspeed(text, path)
    if path.suffix == ".py":
        raise ForerunError(f"{path}: a recipe in Python is not read, as nothing is run; dump its configuration as YAML")
    known = "torchtitan's .toml, Megatron-LM's .sh, .txt or .yaml, DeepSpeed's .json, NeMo's and accelerate's .yaml"
    raise ForerunError(f"{path}: ends in {path.suffix or 'nothing'}; read are {known}")
