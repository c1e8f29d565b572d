"""Loads models by a preset's name or from any kind of model file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.model.convolutional import convolutional_names, load_convolutional
from forerun.describe.model.fields import Fields, read_yaml
from forerun.describe.model.hub import absent, cached_config, is_hub_name
from forerun.describe.model.huggingface import load_huggingface
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.layers_by_hand import load_layers
from forerun.describe.model.parameters import active_parameter_count, parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.describe.model.spec_file import load_spec_file, read_spec

PRESETS = Path(__file__).parent / "presets"
_YAML = (".yaml", ".yml")
_SUFFIXES = (".json", *_YAML)
_LISTING = "forerun models"


@dataclass(frozen=True)
class ModelRow:
    """One preset as `forerun models` lists it, sizes in elements; a layered model has no width and no heads."""

    name: str
    parameters: int
    active_parameters: int
    layers: int
    hidden: int | None
    heads: int | None
    source: str


def load_model(name_or_path: str | Path) -> ModelSpec:
    """Returns the model of a preset's name (in any case), of a config.json or its folder, or of a YAML file.

    A name such as org/model is looked up in the local cache of the Hugging Face hub.

    A preset comes before a folder of its name; write `./name` for the folder. Raises UnknownName for a text that is
    neither a preset nor a path, and ForerunError for a bad file, both in one line.
    """
    name = str(name_or_path).strip()
    may_be_preset = isinstance(name_or_path, str) and _may_be_preset(name)
    if may_be_preset and (name.lower() in _entries() or not name):
        return _preset(name)
    if may_be_preset and name.lower() in convolutional_names():
        raise ForerunError(
            f"{name} is a model given layer by layer, which `forerun predict` and `forerun experiment` take; give a"
            " transformer here (forerun models)"
        )
    path = Path(name).expanduser()
    if _there(path.is_dir):
        return load_huggingface(path)
    if path.suffix in _SUFFIXES:
        return load_huggingface(path) if path.suffix == ".json" else load_spec_file(path)
    if _there(path.exists):
        raise ForerunError(f"{path}: a model file ends in {', '.join(_SUFFIXES)}")
    if isinstance(name_or_path, Path):
        raise ForerunError(f"{path}: no such file or folder")
    if is_hub_name(name):
        config = cached_config(name)
        if config is None:
            raise absent(name, model_names())
        return load_huggingface(config, name.rpartition("/")[2])
    raise UnknownName("model or folder", name, model_names(), _LISTING)


def load_any(name_or_path: str | Path) -> ModelSpec | LayeredModel:
    """Returns a transformer as `load_model` does, or the model of a preset or YAML file that lists its layers."""
    if isinstance(name_or_path, str):
        name = name_or_path.strip()
        if _may_be_preset(name) and name.lower() in convolutional_names():
            return load_convolutional(name)
        if not _is_path(name) and name.lower() not in _entries() and not is_hub_name(name):
            raise UnknownName("model or folder", name, [*model_names(), *convolutional_names()], _LISTING)
    path = Path(name_or_path).expanduser()
    if path.suffix in _YAML and _there(path.is_file):
        document = read_yaml(path)
        if document.present("layers") and not document.present("n_layers"):
            return load_layers(document, path.stem)
    return load_model(name_or_path)


def model_names() -> list[str]:
    """Returns the names of the transformer presets, by family and size."""
    return list(_entries())


def layered_names() -> list[str]:
    """Returns the names of the presets that are given layer by layer, by family and size."""
    return convolutional_names()


def model_table() -> list[ModelRow]:
    """Returns a row for each preset, by family and size; models given layer by layer come last."""
    rows = [_row(_preset(name), entry) for name, entry in _entries().items()]
    return rows + [_layered_row(load_convolutional(name)) for name in layered_names()]


def _layered_row(model: LayeredModel) -> ModelRow:
    parameters = model.parameter_count
    return ModelRow(model.name, parameters, parameters, len(model.layers), None, None, model.source)


def _may_be_preset(name: str) -> bool:
    """Returns whether a text looks like a name, so that the presets have to be read to tell."""
    return "/" not in name and Path(name).suffix not in _SUFFIXES


def _is_path(name: str) -> bool:
    path = Path(name).expanduser()
    return path.suffix in _SUFFIXES or _there(path.exists)


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
    """Returns the result of a path's test. Returns false if the name is too long for the file system."""
    try:
        return test()
    except OSError:
        return False


def _preset(name: str) -> ModelSpec:
    if name.lower() not in _entries():
        raise UnknownName("model", name, model_names(), _LISTING)
    return _read_preset(name.lower())


@cache
def _read_preset(name: str) -> ModelSpec:
    return read_spec(Fields(_entries()[name], f"preset {name}"), name)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    """Returns preset entries by name; the `common` fields of a file apply to each of its models."""
    entries: dict[str, dict[str, Any]] = {}
    for path in sorted(PRESETS.glob("*.yaml")):
        document = read_yaml(path)
        common, models = document.mapping("common"), document.mapping("models")
        document.finish()
        for name, fields in models.items():
            entries[name] = {**common, **fields}
    return entries
