"""Reads a Hugging Face config.json into a ModelSpec.

Each family knows the keys that make its architecture and those that can't change it. Any other key is an error that
names it, as is a value that would make an architecture that the family doesn't have. The modules `huggingface_*.py`
beside this one hold the families.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from forerun.common.errors import at
from forerun.common.shipped import shipped_data
from forerun.describe.model.families import FAMILIES
from forerun.describe.model.fields import Fields, read_json
from forerun.describe.model.spec import ModelSpec

CONFIG = "config.json"


for _module in pkgutil.iter_modules([str(Path(__file__).parent)], "forerun.describe.model."):
    if ".huggingface_" in _module.name:
        importlib.import_module(_module.name)


def load_huggingface(path: str | Path) -> ModelSpec:
    """Returns the model of a config.json (the file, or its folder), named after the folder or file.

    Raises ForerunError, in one line that names file and key, where the file is missing, cut short or no JSON object,
    its `model_type` or architecture is unknown, or a key is missing, unknown, mistyped or impossible.
    """
    path = Path(path)
    if path.is_dir():
        path = path / CONFIG
    name = path.resolve().parent.name if path.name == CONFIG else path.stem
    return spec_from_config(read_json(path), name)


def spec_from_config(config: Fields, name: str) -> ModelSpec:
    """Returns the model of the fields of a config.json. Raises ForerunError as `load_huggingface` does."""
    known = FAMILIES[config.text("model_type", choices=sorted(FAMILIES))]
    for architecture in config.items("architectures"):
        if architecture not in known.architectures:
            classes = ", ".join(known.architectures)
            raise config.error("architectures", f"has {architecture!r}, which is not known; known: {classes}")
    config.expect("is_encoder_decoder", False)
    config.expect("add_cross_attention", False)
    config.expect("tie_encoder_decoder", False)
    config.expect("pruned_heads", {})
    values = known.read(config)
    groups = shipped_data(__package__, "huggingface_keys.yaml").values()
    model_type = config.text("model_type")
    ignored = [key for one in groups if model_type in one.get("families", (model_type,)) for key in one["keys"]]
    config.finish((*ignored, *known.ignored))
    with at(config.place):
        return ModelSpec(name=name, **values)  # type: ignore[arg-type]
