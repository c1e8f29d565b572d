"""The catalogue: presets by name, and `load_model`, which takes a name or any of the model files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, UnknownName
from forerun.model.fields import Fields, read_yaml
from forerun.model.huggingface import load_huggingface
from forerun.model.parameters import active_parameter_count, parameter_count
from forerun.model.spec import ModelSpec
from forerun.model.spec_file import load_spec_file, read_spec

PRESETS = Path(__file__).parent / "presets"
_SUFFIXES = (".json", ".yaml", ".yml")


@dataclass(frozen=True)
class ModelRow:
    """One preset, for a table. Parameters and widths in elements."""

    name: str
    parameters: int
    active_parameters: int
    layers: int
    hidden: int
    heads: int
    source: str


def load_model(name_or_path: str | Path) -> ModelSpec:
    """The model behind a preset's name (in any case), a folder with a config.json, a config.json, or a YAML file.

    A name is looked up before the disk is; write `./name` for a folder of the same name.
    Raises UnknownName for what is neither a preset nor a path, ForerunError for a bad file, both in one line.
    """
    name = str(name_or_path).strip()
    if isinstance(name_or_path, str) and (name.lower() in _entries() or not name):
        return _preset(name)
    path = Path(name).expanduser()
    if _there(path.is_dir):
        return load_huggingface(path)
    if path.suffix in _SUFFIXES:
        return load_huggingface(path) if path.suffix == ".json" else load_spec_file(path)
    if _there(path.exists):
        raise ForerunError(f"{path}: a model file ends in {', '.join(_SUFFIXES)}")
    if isinstance(name_or_path, Path):
        raise ForerunError(f"{path}: no such file or folder")
    raise UnknownName("model or folder", name, model_names())


def model_names() -> list[str]:
    """The presets' names, by family and size."""
    return list(_entries())


def model_table() -> list[ModelRow]:
    """A row for each preset, by family and size."""
    return [_row(_preset(name), entry) for name, entry in _entries().items()]


def _row(spec: ModelSpec, entry: Mapping[str, Any]) -> ModelRow:
    return ModelRow(
        spec.name,
        parameter_count(spec),
        active_parameter_count(spec),
        spec.n_layers,
        spec.hidden,
        spec.n_heads,
        entry["source"],
    )


def _there(test: Callable[[], bool]) -> bool:
    """A name too long for the file system is not there."""
    try:
        return test()
    except OSError:
        return False


def _preset(name: str) -> ModelSpec:
    if name.lower() not in _entries():
        raise UnknownName("model", name, model_names())
    return _read_preset(name.lower())


@cache
def _read_preset(name: str) -> ModelSpec:
    return read_spec(Fields(_entries()[name], f"preset {name}"), name)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    """Preset entries by name; a file's `common` fields hold for each of its models."""
    entries: dict[str, dict[str, Any]] = {}
    for path in sorted(PRESETS.glob("*.yaml")):
        document = read_yaml(path)
        common, models = document.mapping("common"), document.mapping("models")
        document.finish()
        for name, fields in models.items():
            entries[name] = {**common, **fields}
    return entries
