"""read_experiment: an experiment from a YAML or JSON file, a preset or a mapping (docs/experiments.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from forerun.answers.analysis.setup import Setup
from forerun.answers.experiment.description.assembly import assembled
from forerun.answers.experiment.description.config import top_config, whole_paths
from forerun.answers.experiment.description.key_table import key_table
from forerun.answers.experiment.description.model import DIMENSIONS, SOURCES
from forerun.answers.experiment.description.objects import plain
from forerun.answers.experiment.description.schema import SECTIONS, checked, known_keys
from forerun.answers.experiment.description.sections import TopLevel
from forerun.answers.experiment.description.text import read_mapping, refuse_unknown, refuse_wild
from forerun.answers.experiment.description.training import SPELLINGS
from forerun.answers.experiment.handlers import EventHandler
from forerun.answers.experiment.request import Request
from forerun.common.errors import ForerunError, UnknownName
from forerun.common.own_code import is_own_code, load_own
from forerun.common.yaml_files import check

__all__ = ["PresetRow", "changed", "key_table", "preset_names", "preset_path", "preset_table", "read_experiment"]

PRESETS = Path(__file__).parent / "presets"
_FILE_SUFFIXES = (".yaml", ".yml", ".json")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_NODE_RATES = ("intra_node_bandwidth", "intra_node_bandwidth_gbps")
_NETWORK_RATES = ("network_bandwidth", "network_bandwidth_gbps")
_FIGURES = ("compute_tflops", "memory_gb", "memory_bandwidth_gb_s", *_NODE_RATES)
_LENGTHS = ("num_iterations", "total_tokens", "total_samples")
_REPLACED: dict[str, dict[str, tuple[str, ...]]] = {
    "hardware": {
        "gpu_model": ("cluster", *_FIGURES),
        "cluster": ("gpu_model", *_FIGURES),
        **{key: (other,) for pair in (_NODE_RATES, _NETWORK_RATES) for key, other in (pair, pair[::-1])},
    },
    "model": {key: tuple(sorted({*SOURCES, *DIMENSIONS, "sample"} - {key})) for key in SOURCES},
    "training": {
        **{key: (other,) for pair in SPELLINGS.items() for key, other in (pair, pair[::-1])},
        **{key: tuple(other for other in _LENGTHS if other != key) for key in _LENGTHS},
    },
    "network": {"topology_type": ("file", "oversubscription"), "file": ("topology_type", "base_latency_us")},
}
"""section -> key -> keys that the key replaces"""


def read_experiment(source: str | Path | Mapping[str, Any]) -> Request:
    """Returns the experiment in a YAML or JSON file, of a preset's name, or in a mapping of sections.

    Paths in a file are relative to its folder, those in a mapping to the current one. A mapping may hold Python
    objects: a ModelSpec or LayeredModel as model, a Network as network, a CommunicationPattern, its class or a
    function as communication_pattern, Prices, Thresholds, handlers.

    Raises:
        UnknownName: neither a preset nor a file.
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: one line that names the file and the key.
    """
    if isinstance(source, Mapping):
        return _request(source, Path.cwd(), "experiment", "experiment")
    text = str(source).strip()
    if isinstance(source, str) and text.lower() in preset_names():
        path = PRESETS / f"{text.lower()}.yaml"
        return _request(read_mapping(path), PRESETS, f"preset {text.lower()}", text.lower())
    path = Path(text).expanduser()
    if isinstance(source, str) and path.suffix.lower() not in _FILE_SUFFIXES and not _is_file(path):
        raise UnknownName("experiment or file", text, list(preset_names()))
    return _request(read_mapping(path), path.parent, str(path), _UNSAFE.sub("-", path.stem).strip("-.") or "experiment")


def changed(request: Request, changes: Mapping[str, Any]) -> Request:
    """Returns `request` with other values of keys, named as `section.key`: {"training.num_nodes": 8}.

    None removes a key. All other keys stay as they were given, and values that follow from a changed key are derived
    again: the plan from the number of nodes, mixed_precision from the device, a topology from its size. Keys that the
    change replaces are removed, unless they are among the changes: another gpu_model removes the figures of the old
    one, another model removes the old one's dimensions, and a key of a Plan removes the other key for the same field.

    Raises ForerunError as `read_experiment` does, and for a request that was not made from sections.
    """
    if not request.given:
        raise ForerunError(
            f"{request.name}: this request was made in Python without sections; change its setup instead"
        )
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in request.given.items()}
    for name, value in changes.items():
        section, dot, key = name.partition(".")
        if not dot:
            data[section] = value
            continue
        keys = dict(data.get(section) or {})
        gone = _REPLACED.get(section, {}).get(key, ()) if value is not None else ()
        for each in (key, *(other for other in gone if f"{section}.{other}" not in changes)):
            keys.pop(each, None)
        data[section] = keys if value is None else {**keys, key: value}
    return _request(data, Path.cwd(), request.name, request.name)


@cache
def preset_names() -> tuple[str, ...]:
    """Names of the experiments that come with Forerun, in alphabetical order."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """Returns the file of a preset. Raises UnknownName, which lists them."""
    if name.strip().lower() not in preset_names():
        raise UnknownName("preset", name, list(preset_names()))
    return PRESETS / f"{name.strip().lower()}.yaml"


@dataclass(frozen=True)
class PresetRow:
    """One preset, for a table."""

    name: str
    model: str
    gpus: str
    """number and kind"""
    description: str


def preset_table() -> list[PresetRow]:
    """Returns a row for each preset, in alphabetical order."""
    rows = []
    for name in preset_names():
        request = read_experiment(name)
        rows.append(PresetRow(name, request.setup.model.name, _gpus(request.setup), request.given["description"]))
    return rows


def _gpus(setup: Setup) -> str:
    others = [(kind.n_gpus, kind.name) for kind in setup.kinds]
    sizes = [(setup.n_gpus - sum(size for size, _ in others), setup.cluster.device.name), *others]
    return " + ".join(f"{size} x {name}" for size, name in sizes if size)


def _request(source: Mapping[str, Any], folder: Path, place: str, name: str) -> Request:
    refuse_wild(source, place)
    data = whole_paths(plain(source), folder)
    if isinstance(data.get("description"), str):
        data["description"] = " ".join(data["description"].split())
    refuse_unknown(data, [*TopLevel.model_fields, *SECTIONS], known_keys(), place)
    top = check(TopLevel, {key: value for key, value in data.items() if key not in SECTIONS}, place)
    sections = checked(data, place)
    request = assembled(sections, place, top.name or name)
    config = {**top_config(top), "name": request.name, **request.config}
    handlers = tuple(_handler(each, f"{place}: handlers.{number}") for number, each in enumerate(top.handlers))
    return replace(request, handlers=handlers, config=config, given=data)


def _handler(given: object, place: str) -> object:
    """Returns an event handler; a class is called."""
    if isinstance(given, str):
        if not is_own_code(given):
            raise ForerunError(f"{place}: expected FILE.py:NAME, got {given!r:.60}")
        given = load_own(given, place)
    try:
        handler = given() if isinstance(given, type) else given
    except Exception as error:
        raise ForerunError(f"{place}: {given}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    if not isinstance(handler, EventHandler):
        raise ForerunError(
            f"{place}: {handler!r:.60} is no EventHandler; give one, a subclass of it or a function subscribed with @on"
        )
    return handler


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
