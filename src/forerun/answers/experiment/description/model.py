"""The model of an experiment: a family with dimensions, a preset, a file, keys, or layers written by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from forerun.answers.experiment.description.sections import ModelSection
from forerun.common.errors import ForerunError, UnknownName, at
from forerun.common.own_code import is_own_code, load_own
from forerun.common.shipped import shipped_data
from forerun.describe.model.catalog import layered_names, load_any, load_model, model_names
from forerun.describe.model.fields import Fields
from forerun.describe.model.inputs import trained_with
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.layers_by_hand import layers_from
from forerun.describe.model.spec import ModelSpec
from forerun.describe.model.spec_file import read_spec

SOURCES = ("model_type", "preset", "config", "spec", "layers")
DIMENSIONS = {
    "num_layers": "n_layers",
    "hidden_size": "hidden",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "ffn_hidden_size": "ffn_hidden",
    "vocab_size": "vocab",
    "max_position_embeddings": "max_positions",
    "activation": "mlp",
    "norm": "norm",
    "position": "position",
    "causal": "causal",
    "tie_word_embeddings": "tied_embeddings",
}
"""key -> field of ModelSpec"""
INPUTS = {
    "mtp_modules": "mtp_modules",
    "images": "images",
    "encoder_sequence_length": "encoder_seq_len",
    "freeze_encoder": "freeze_encoder",
}
"""key -> parameter of `trained_with`"""
_FREE_LENGTH = 2048
"""sequence_length of a model whose positions have no table"""


def model_of(section: ModelSection, place: str) -> tuple[ModelSpec | LayeredModel, int]:
    """Returns the model, and the tokens of a sample (1 for a model without sequences).

    Raises ForerunError: no model or two, an unknown name, a wrong file, dimensions that don't fit each other.
    """
    given = [key for key in SOURCES if getattr(section, key) is not None]
    if not given:
        raise ForerunError(f"{place}: key 'model_type' is missing; give it or one of {', '.join(SOURCES[1:])}")
    if len(given) > 1 and not (given == ["model_type", "preset"] and section.model_type == section.preset):
        raise ForerunError(f"{place}: {' and '.join(given)} each name a model; keep one of them")
    model = _base(section, given[0], place)
    dimensions = {key: getattr(section, key) for key in DIMENSIONS if getattr(section, key) is not None}
    if isinstance(model, LayeredModel):
        wrong = [*dimensions, *(["sequence_length"] if section.sequence_length else []), *_inputs(section)]
        if wrong:
            raise ForerunError(
                f"{place}: {wrong[0]} is for transformers, but {model.name} is given layer by layer; leave it out"
            )
        return replace(model, name=section.name or model.name), 1
    if section.sample is not None:
        raise ForerunError(f"{place}: sample is only for layers written by hand; leave it out for {model.name}")
    family = section.model_type is not None and section.model_type.strip().lower() in families()
    if family and model.position == "learned" and section.max_position_embeddings is None and section.sequence_length:
        model = replace(model, max_positions=max(model.max_positions, section.sequence_length))
    if dimensions:
        model = _resized(model, dimensions, place)
    length = section.sequence_length or (model.max_positions if model.position == "learned" else _FREE_LENGTH)
    if model.position == "learned" and length > model.max_positions:
        raise ForerunError(
            f"{place}: sequence_length {length} is longer than max_position_embeddings {model.max_positions} of"
            f" {model.name}; lower the one or raise the other"
        )
    inputs = _inputs(section)
    if inputs:
        with at(f"{place}: {', '.join(inputs)}"):
            model = trained_with(model, **{INPUTS[key]: value for key, value in inputs.items()})
    return replace(model, name=section.name or model.name), length


def _inputs(section: ModelSection) -> dict[str, Any]:
    """Returns the keys about inputs of an encoder and multi-token prediction that the section states."""
    stated = {key: getattr(section, key) for key in INPUTS}
    return {key: value for key, value in stated.items() if value is not None and value is not False}


@cache
def families() -> dict[str, ModelSpec]:
    """Returns the dimensions of model_type transformer, gpt2 and bert unless the experiment gives them."""
    families = {}
    for name, entry in shipped_data("forerun.answers.experiment.description", "families.yaml").items():
        if "like" in entry:
            families[name] = replace(load_model(entry["like"]), name=name)
        else:
            families[name] = read_spec(Fields(entry["fields"], f"families.yaml: {name}"), name)
    return families


def is_convolutional(model: ModelSpec | LayeredModel) -> bool:
    """Returns whether it has convolutions."""
    return isinstance(model, LayeredModel) and any(layer.layer_type == "conv2d" for layer in model.layers)


def _base(section: ModelSection, source: str, place: str) -> ModelSpec | LayeredModel:
    value = getattr(section, source)
    if source == "config":
        with at(f"{place}: config"):
            return load_model(Path(value))
    if source == "spec":
        fields = Fields({str(key): each for key, each in value.items()}, f"{place}: spec")
        return read_spec(fields, fields.text("name", section.name or "model"))
    if source == "layers":
        return _layers(value, section, f"{place}: layers")
    word = value.strip().lower()
    if word in families():
        return families()[word]
    if word not in {*model_names(), *layered_names()}:
        known = [*families(), *model_names(), *layered_names()]
        raise ForerunError(f"{place}: {source}: {UnknownName('model', value, known, 'forerun models')}")
    return load_any(word)


def _layers(value: object, section: ModelSection, place: str) -> LayeredModel:
    """Returns the layers of a list, of a model that a Python file makes, or of a LayeredModel."""
    if isinstance(value, LayeredModel):
        return value
    if not isinstance(value, str):
        model = layers_from(value, place, section.name or "layers", section.sample or "image")
        return replace(model, source="")
    if not is_own_code(value):
        raise ForerunError(f"{place}: expected a list of layers or FILE.py:NAME, got {value!r:.60}")
    found = load_own(value, place)
    if not isinstance(found, LayeredModel) and callable(found):
        try:
            found = found()
        except Exception as error:
            raise ForerunError(f"{place}: {value}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    if not isinstance(found, LayeredModel):
        raise ForerunError(
            f"{place}: {value} is a {type(found).__name__}; expected a LayeredModel or a function that returns one"
        )
    return found


def _resized(base: ModelSpec, dimensions: dict[str, Any], place: str) -> ModelSpec:
    """Returns `base` with other dimensions; dimensions that depend on them and are not given change in proportion."""
    fields = {DIMENSIONS[key]: value for key, value in dimensions.items()}
    hidden = fields.get("hidden", base.hidden)
    if hidden != base.hidden and "ffn_hidden" not in fields:
        fields["ffn_hidden"] = _share(
            hidden * base.ffn_hidden, base.hidden, "ffn_hidden_size", f"hidden_size {hidden}", place
        )
    if hidden != base.hidden and "n_heads" not in fields and base.n_heads:
        fields["n_heads"] = _share(hidden, base.head_dim, "num_attention_heads", f"hidden_size {hidden}", place)
    heads = fields.get("n_heads", base.n_heads)
    if base.mla is None and heads:
        if heads != base.n_heads and "n_kv_heads" not in fields:
            fields["n_kv_heads"] = _share(
                heads * base.n_kv_heads, base.n_heads, "num_key_value_heads", f"num_attention_heads {heads}", place
            )
        if hidden != base.hidden or heads != base.n_heads:
            if hidden % heads:
                raise ForerunError(
                    f"{place}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; change one"
                )
            fields["head_dim"] = hidden // heads
    if fields.get("position") == "learned" and not fields.get("max_positions", base.max_positions):
        raise ForerunError(
            f"{place}: key 'max_position_embeddings' is missing; position: learned needs the rows of its table"
        )
    if heads and base.mla is None and heads % fields.get("n_kv_heads", base.n_kv_heads):
        kv_heads = fields.get("n_kv_heads", base.n_kv_heads)
        raise ForerunError(
            f"{place}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; change one"
        )
    with at(place):
        return replace(base, **fields)


def _share(product: int, parts: int, key: str, because: str, place: str) -> int:
    whole, rest = divmod(product, parts)
    if rest or not whole:
        raise ForerunError(f"{place}: key {key!r} is missing; give it, because no whole number follows from {because}")
    return whole
