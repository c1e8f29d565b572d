"""Reads a Hugging Face config.json into a ModelSpec.

Each family knows the keys that make its architecture, and refuses a value that would make an architecture that it
doesn't have. The model's `notes` list the other keys of a file, except those that can't change the cost of training
(`huggingface_keys.yaml`); a key that is one letter off is an error. The modules `huggingface_*.py` beside this one hold
the families.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any, cast

from forerun.common.errors import at
from forerun.common.shipped import shipped_data
from forerun.describe.model.families import FAMILIES, WRAPPERS, Values
from forerun.describe.model.fields import Fields, read_json
from forerun.describe.model.huggingface_projectors import tower_of
from forerun.describe.model.meta_device import spec_from_transformers
from forerun.describe.model.spec import MOST_LAYERS, ModelSpec

CONFIG = "config.json"
_OF_TOWERS = (
    "audio_config",
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)
"""keys that older files have beside those of the language model"""
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


for _module in pkgutil.iter_modules([str(Path(__file__).parent)], "forerun.describe.model."):
    if ".huggingface_" in _module.name:
        importlib.import_module(_module.name)


def load_huggingface(path: str | Path, name: str = "") -> ModelSpec:
    """Returns the model of a config.json (the file, or its folder), named `name`, or after the folder or file.

    Raises ForerunError, in one line that names file and key, where the file is missing, cut short or no JSON object,
    its `model_type` or architecture is unknown, or a key is missing, unknown, mistyped or impossible.
    """
    path = Path(path)
    if path.is_dir():
        path = path / CONFIG
    name = name or (path.resolve().parent.name if path.name == CONFIG else path.stem)
    return spec_from_config(read_json(path), name)


def spec_from_config(config: Fields, name: str) -> ModelSpec:
    """Returns the model of the fields of a config.json. Raises ForerunError as `load_huggingface` does."""
    model_type = config.text("model_type")
    if model_type not in FAMILIES and not _wraps(config, model_type):
        return spec_from_transformers(config, name)
    if _wraps(config, model_type):
        text = config.section("text_config") or config  # older files have these keys beside those of the tower
        values, notes = _read(text, _text_type(text, model_type), behind_tower=True)
        if config.stated("tie_word_embeddings"):
            tied = config.flag("tie_word_embeddings")
            values["tied_embeddings"] = tied and text.flag("tie_word_embeddings", tied)
        tower = tower_of(config, model_type, cast(int, values["hidden"]))
        values["encoder"] = tower
        notes = notes if tower else (_left_out(config, model_type), *notes)
    else:
        values, notes = _read(config, model_type)
    with at(config.place):
        return ModelSpec(name=name, notes=notes, **values)  # type: ignore[arg-type]


def _wraps(config: Fields, model_type: str) -> bool:
    """Returns whether a file is of a language model behind a tower: a known one, or one whose `text_config` names a
    family."""
    if model_type in WRAPPERS or model_type in FAMILIES:
        return model_type in WRAPPERS
    text = config.section("text_config") if config.present("text_config") else None
    return text is not None and text.is_text("model_type") and text.text("model_type") in FAMILIES


def _left_out(config: Fields, model_type: str) -> str:
    """Returns the sentence on a tower that nothing here reads."""
    left_out = [key for key in ("vision_config", "audio_config") if config.present(key)]
    return f"{config.place}: the language model of {model_type} alone; left out: {', '.join(left_out) or 'its tower'}"


def _text_type(text: Fields, wrapper: str) -> str:
    """Returns the model_type of the language model behind a tower."""
    usual = WRAPPERS.get(wrapper, "")
    stated = text.text("model_type", usual)
    known = usual if stated in (wrapper, f"{wrapper}_text") and stated not in FAMILIES else stated
    if known not in FAMILIES:
        raise text.error("model_type", f"{stated!r} is not known; known: {', '.join(sorted(FAMILIES))}")
    return known


def _rope_theta(config: Fields) -> Values:
    """Reads the base of rotary positions, where the file has one for all layers."""
    parameters = config.section("rope_parameters")
    if parameters is None or config.stated("rope_theta"):
        return {"rope_theta": config.number("rope_theta")}
    return {"rope_theta": parameters.number("rope_theta")}


def _read(config: Fields, model_type: str, behind_tower: bool = False) -> tuple[Values, tuple[str, ...]]:
    """Returns the fields of a model, and the keys of its file that nothing here uses.

    Where the model stands behind a tower, `architectures` names the class of both.
    """
    known = FAMILIES[model_type]
    config.limit(_LAYER_KEYS, MOST_LAYERS, "layers are simulated")
    for architecture in config.items("architectures"):
        if architecture not in known.architectures and not behind_tower:
            classes = ", ".join(known.architectures)
            raise config.error("architectures", f"has {architecture!r}, which is not known; known: {classes}")
    config.expect("is_encoder_decoder", *{known.encodes, False})
    config.expect("add_cross_attention", False)
    config.expect("tie_encoder_decoder", False)
    config.expect("pruned_heads", {})
    values = known.read(config) | _rope_theta(config)
    said = cast("tuple[str, ...]", values.pop("notes", ()))
    groups: dict[str, dict[str, Any]] = shipped_data(__package__, "huggingface_keys.yaml")
    ignored = (*_OF_TOWERS, *known.ignored) if behind_tower else known.ignored
    unread, listed = config.unread(("model_type", *ignored)), []
    for what, group in groups.items():
        found = [key for key in unread if key in group["keys"]]
        if model_type not in group.get("families", (model_type,)):
            continue
        unread = [key for key in unread if key not in found]
        if found and group.get("listed"):
            listed.append(f"{', '.join(found)} ({what})")
    config.refuse_misspelt(unread)
    if unread:
        listed.append(f"{', '.join(unread)} (not known)")
    notes = tuple(f"{config.place}: {note}" for note in said)
    return values, (*notes, f"{config.place}: the prediction doesn't use {'; '.join(listed)}") if listed else notes
