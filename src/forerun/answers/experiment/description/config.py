"""The configuration of a run: every key of its sections with the value in force, as plain data that reads back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.answers.experiment.description.hardware import is_path
from forerun.answers.experiment.description.model import DIMENSIONS, families
from forerun.answers.experiment.description.sections import (
    PLAN_KEYS,
    HardwareSection,
    ModelSection,
    NetworkSection,
    Section,
    TopLevel,
    TrainingSection,
)
from forerun.answers.experiment.description.training import DEFAULT_ITERATIONS, SPELLINGS
from forerun.answers.experiment.request import Disturbance, Prices
from forerun.common.own_code import is_own_code
from forerun.common.yaml_files import read_yaml
from forerun.core.network.patterns_catalog import PATTERNS
from forerun.describe.cluster.types import is_profile_file
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.model.spec_file import spec_mapping
from forerun.describe.plan.plan import Plan

_PATHS = (("hardware", "cluster"), ("model", "config"), ("network", "file"), ("prices", "file"))
"""keys that may hold the path of a file"""
_OWN_CODE = (("model", "layers"), ("training", "communication_pattern"))
"""keys that may hold FILE.py:NAME"""
_SPELT = {*SPELLINGS.values(), "seq_len"}
"""keys of a Plan that an experiment spells in another way"""


def whole_paths(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns `data` with absolute paths."""

    def whole(value: Any) -> Any:
        return os.path.abspath(folder / value)

    found = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    for section, key in _PATHS:
        value = found.get(section)
        if isinstance(value, dict) and isinstance(value.get(key), str) and (key != "cluster" or is_path(value[key])):
            value[key] = whole(value[key])
    for section, key in _OWN_CODE:
        value = found.get(section)
        if isinstance(value, dict) and isinstance(value.get(key), str) and is_own_code(value[key]):
            value[key] = whole(value[key])
    training = found.get("training")
    pattern = training.get("communication_pattern") if isinstance(training, dict) else None
    if isinstance(pattern, dict) and isinstance(pattern.get("name"), str) and is_own_code(pattern["name"]):
        found["training"]["communication_pattern"] = {**pattern, "name": whole(pattern["name"])}
    if isinstance(found.get("handlers"), (list, tuple)):
        found["handlers"] = [whole(each) if isinstance(each, str) else each for each in found["handlers"]]
    return found


def top_config(top: TopLevel) -> dict[str, Any]:
    """Returns the keys outside the sections, `name` first."""
    return {"name": None, **_dumped(top)}


def hardware_config(section: HardwareSection, node_size: int) -> dict[str, Any]:
    """Returns `hardware`; the keys of a cluster file in place of its path."""
    data = _dumped(section)
    data.pop("preset", None)
    data["num_gpus_per_node"] = node_size
    if isinstance(section.cluster, str) and is_path(section.cluster):
        path = Path(section.cluster)
        data["cluster"] = {"name": path.stem, **read_yaml(path)}
        if "network" in data["cluster"]:
            data["cluster"]["network"] = os.path.abspath(path.parent / data["cluster"]["network"])
        device = data["cluster"].get("device")
        if isinstance(device, dict) and is_profile_file(str(device.get("cost_profile"))):
            whole = os.path.abspath(path.parent / device["cost_profile"])
            data["cluster"]["device"] = {**device, "cost_profile": whole}
    return _ordered(HardwareSection, data)


def model_config(section: ModelSection, model: ModelSpec | LayeredModel, seq_len: int) -> dict[str, Any]:
    """Returns `model`; the keys of a model in place of its file, and every dimension of a family."""
    data = _dumped(section)
    if isinstance(model, LayeredModel):
        return data
    if section.config is not None or section.spec is not None:
        return {"spec": spec_mapping(model), "sequence_length": seq_len}
    if section.model_type is not None and section.model_type.strip().lower() in families():
        own = {key: getattr(model, field) for key, field in DIMENSIONS.items()}
        data |= {key: value for key, value in own.items() if value != 0 or isinstance(value, bool)}
    return _ordered(ModelSection, data | {"sequence_length": seq_len})


def training_config(
    section: TrainingSection,
    plan_keys: Mapping[str, Any],
    values: Mapping[str, Any],
    plan: Plan,
    disturbance: Disturbance,
    num_nodes: int,
) -> dict[str, Any]:
    """Returns `training`; `plan_keys` are those of a Plan that were given, `values` all of them, with -1 for the
    rest."""
    data = _dumped(section)
    data |= {key: getattr(plan, field) for key, field in SPELLINGS.items() if key != "mixed_precision"}
    data["mixed_precision"] = plan_keys.get("precision", section.mixed_precision)
    data["num_nodes"] = num_nodes
    if section.total_tokens is None and section.total_samples is None:
        data.setdefault("num_iterations", DEFAULT_ITERATIONS)
    if section.warmup_iterations:
        data["warmup_slowdown"] = disturbance.warmup_slowdown
    own = {key: values.get(key, getattr(plan, key)) for key in PLAN_KEYS if key not in _SPELT}
    if not plan.ddp_bucket_mib:  # the stack's own size, which has no number in MiB
        own["ddp_bucket_mib"] = data.pop("bucket_size_mb")
    return _ordered(TrainingSection, data) | {key: _plain(value) for key, value in own.items() if value is not None}


def network_config(section: NetworkSection) -> dict[str, Any]:
    """Returns `network`; the keys of a network file in place of its path."""
    data = _dumped(section)
    if isinstance(section.file, str):
        data["file"] = {"bandwidth_unit": "GB/s", **read_yaml(Path(section.file))}
    return data


def prices_config(section: dict[str, Any], prices: Prices) -> dict[str, Any]:
    """Returns `prices`, with the contents of a price file in place of its path."""
    if prices.by_name and prices.dollars_per_gpu_hour is not None:
        return dict(section)  # prices by name here and one for the rest in a file: no single key says both
    data = asdict(prices)
    by_name = data.pop("by_name")
    data["dollars_per_gpu_hour"] = dict(sorted(by_name.items())) or data["dollars_per_gpu_hour"]
    return {key: value for key, value in data.items() if value is not None}


def _dumped(section: Section) -> dict[str, Any]:
    """Returns the keys of a section that have a value, in the order of the schema."""
    values = {key: getattr(section, key) for key in type(section).model_fields}
    return {key: _plain(value) for key, value in values.items() if value is not None}


def _ordered(kind: type[Section], data: dict[str, Any]) -> dict[str, Any]:
    """Returns `data` in the order of the schema. A file that is read and written again stays the same."""
    return {key: data[key] for key in kind.model_fields if key in data}


def _plain(value: Any) -> Any:
    """Returns `value` as YAML has it; the name of an object that YAML can't express."""
    if isinstance(value, Section):
        return _dumped(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    shipped = next((name for name, made in PATTERNS.items() if type(value) is made and value == made()), None)
    return shipped or f"(Python) {getattr(value, 'name', getattr(value, '__name__', type(value).__name__))}"
