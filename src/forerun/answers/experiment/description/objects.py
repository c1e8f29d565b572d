"""Replace Python objects in an experiment's mapping by the keys that a file would have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from forerun.answers.experiment.request import Prices, Thresholds
from forerun.common.errors import UnknownName
from forerun.core.network.network_file import Network
from forerun.describe.model.catalog import load_any
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.model.spec_file import spec_mapping


def plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `data` with a ModelSpec, Network, Prices and Thresholds as keys and values; other objects stay.

    A ModelSpec may stand for the section `model` or for its key spec, a LayeredModel for `model` or its key layers, a
    Network for `network` or its key file.
    """
    found = {str(key): _plain_section(value) for key, value in data.items()}
    for section, key in (("model", "spec"), ("network", "file")):
        value = found.get(section)
        if isinstance(value, dict) and isinstance(value.get(key), (ModelSpec, Network)):
            found[section] = {**value, key: _keys(value[key])}
    return found


def _plain_section(value: Any) -> Any:
    if isinstance(value, ModelSpec):
        return {"spec": _keys(value)}
    if isinstance(value, LayeredModel):
        return {"preset": value.name} if _is_preset(value) else {"layers": value}
    if isinstance(value, Network):
        return {"file": _keys(value)}
    if isinstance(value, Prices):
        by_name = {"dollars_per_gpu_hour": value.by_name} if value.by_name else {}
        return {key: each for key, each in (asdict(value) | by_name).items() if key != "by_name" and each is not None}
    if isinstance(value, Thresholds):
        return asdict(value)
    return {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else value


def _is_preset(model: LayeredModel) -> bool:
    try:
        return load_any(model.name) == model
    except UnknownName:
        return False


def _keys(value: ModelSpec | Network) -> dict[str, Any]:
    if isinstance(value, ModelSpec):
        return spec_mapping(value)
    return {
        "topology": [dim.topology for dim in value.dims],
        "npus_count": [list(dim.sizes) for dim in value.dims],
        "bandwidth": [dim.bandwidth_gbps for dim in value.dims],
        "latency": [dim.latency_ns for dim in value.dims],
        "options": [dict(dim.options) for dim in value.dims],
        "bandwidth_unit": "GiB/s" if value.gib else "GB/s",
    }
