"""read_experiment: an experiment from a YAML or JSON file, a preset or a mapping (docs/experiments.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from forerun.analysis.setup import Setup
from forerun.cluster.files import check
from forerun.errors import ForerunError, UnknownName
from forerun.experiment.description_config import (
    hardware_config,
    model_config,
    network_config,
    prices_config,
    top_config,
    training_config,
    whole_paths,
)
from forerun.experiment.description_echo import echo_of
from forerun.experiment.description_hardware import adapted, base_cluster, cluster_sizes, rank_kinds
from forerun.experiment.description_model import is_convolutional, model_of
from forerun.experiment.description_network import network_of, pattern_in_force
from forerun.experiment.description_objects import plain
from forerun.experiment.description_sections import (
    PLAN_KEYS,
    HardwareSection,
    ModelSection,
    NetworkSection,
    Section,
    ThresholdsSection,
    TopLevel,
    TrainingSection,
)
from forerun.experiment.description_text import at, read_mapping, refuse_unknown, refuse_wild
from forerun.experiment.description_training import (
    DEFAULTS_BY_KIND,
    agreed,
    bounded,
    check_buckets,
    disturbance_of,
    iterations_of,
    open_axes,
    peak_dtype,
    plan_of,
    precision_of,
    schedules_of,
)
from forerun.experiment.handlers import EventHandler
from forerun.experiment.key_table import SECTIONS, key_table
from forerun.experiment.own_code import is_own_code, load_own
from forerun.experiment.prices import prices_of
from forerun.experiment.request import Request, Thresholds
from forerun.model.layered import LayeredModel
from forerun.network.patterns_catalog import pattern_of
from forerun.plan.constraints import check_plan
from forerun.plan.fields import plan_fields

__all__ = ["PresetRow", "changed", "key_table", "preset_names", "preset_table", "read_experiment"]

PRESETS = Path(__file__).parent / "presets"
_NEEDED = ("hardware", "model", "training")
_FILE_SUFFIXES = (".yaml", ".yml", ".json")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
S = TypeVar("S", bound=Section)


def read_experiment(source: str | Path | Mapping[str, Any]) -> Request:
    """The experiment in a YAML or JSON file, of a preset's name, or in a mapping of sections.

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
        raise UnknownName("experiment (and there is no such file)", text, list(preset_names()))
    return _request(read_mapping(path), path.parent, str(path), _UNSAFE.sub("-", path.stem).strip("-.") or "experiment")


def changed(request: Request, changes: Mapping[str, Any]) -> Request:
    """`request` with other values of keys, named as `section.key`: {"training.num_nodes": 8}. None takes a key away.

    All else is as it was given, so that what follows from a key follows from its new value: the plan from the number
    of nodes, mixed_precision from the device, a topology from its size.

    Raises:
        ForerunError: as `read_experiment`.
    """
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in request.given.items()}
    for name, value in changes.items():
        section, dot, key = name.partition(".")
        if not dot:
            data[section] = value
        elif value is None:
            data.setdefault(section, {}).pop(key, None)
        else:
            data[section] = {**(data.get(section) or {}), key: value}
    return _request(data, Path.cwd(), request.name, request.name)


@cache
def preset_names() -> tuple[str, ...]:
    """Names of the experiments that come with Forerun, in alphabetical order."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


@dataclass(frozen=True)
class PresetRow:
    """One preset, for a table."""

    name: str
    model: str
    gpus: str
    """number and kind"""
    description: str


def preset_table() -> list[PresetRow]:
    """A row for each preset, in alphabetical order."""
    rows = []
    for name in preset_names():
        request = read_experiment(name)
        rows.append(PresetRow(name, request.setup.model.name, _gpus(request.setup), request.given["description"]))
    return rows


def _gpus(setup: Setup) -> str:
    others = [(kind.n_gpus, kind.name) for kind in setup.kinds]
    sizes = [(setup.n_gpus - sum(size for size, _ in others), setup.cluster.device.name), *others]
    return " + ".join(f"{size} x {name}" for size, name in sizes if size)


@dataclass(frozen=True)
class _Sections:
    """The sections, checked one by one."""

    hardware: HardwareSection
    model: ModelSection
    training: TrainingSection
    plan_keys: dict[str, Any]
    network: NetworkSection
    thresholds: ThresholdsSection
    prices: dict[str, Any]


def _request(source: Mapping[str, Any], folder: Path, place: str, name: str) -> Request:
    refuse_wild(source, place)
    data = whole_paths(plain(source), folder)
    if isinstance(data.get("description"), str):
        data["description"] = " ".join(data["description"].split())
    refuse_unknown(data, [*TopLevel.model_fields, *SECTIONS], _known_keys(), place)
    top = check(TopLevel, {key: value for key, value in data.items() if key not in SECTIONS}, place)
    sections = _checked(data, place)
    request = _assembled(sections, place, top.name or name)
    config = {**top_config(top), "name": request.name, **request.config}
    handlers = tuple(_handler(each, f"{place}: handlers.{number}") for number, each in enumerate(top.handlers))
    return replace(request, handlers=handlers, config=config, given=data)


def _checked(data: Mapping[str, Any], place: str) -> _Sections:
    found: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        if name in _NEEDED and name not in data:
            raise ForerunError(f"{place}: section {name!r} is missing; an experiment has {', '.join(_NEEDED)}")
        value = {} if data.get(name) is None else data[name]
        if not isinstance(value, dict):
            raise ForerunError(f"{place}: {name}: expected keys and values, got {type(value).__name__} {value!r:.40}")
        known = [*SECTIONS[name].model_fields, *(PLAN_KEYS if name == "training" else ())]
        refuse_unknown(value, known, _known_keys(), f"{place}: {name}")
        found[name] = value
    size = _section(HardwareSection, {"preset": found["hardware"].get("preset")}, f"{place}: hardware").preset
    if size is not None:
        _fill_size(found, size)
    training = found["training"]
    own = {key: value for key, value in training.items() if key not in PLAN_KEYS}
    plan_keys = {key: value for key, value in training.items() if key in PLAN_KEYS}
    return _Sections(
        hardware=_section(HardwareSection, found["hardware"], f"{place}: hardware"),
        model=_section(ModelSection, found["model"], f"{place}: model"),
        training=_section(TrainingSection, own, f"{place}: training"),
        plan_keys=bounded(plan_fields(plan_keys, f"{place}: training"), f"{place}: training"),
        network=_section(NetworkSection, found["network"], f"{place}: network"),
        thresholds=_section(ThresholdsSection, found["thresholds"], f"{place}: thresholds"),
        prices=found["prices"],
    )


def _section(kind: type[S], data: dict[str, Any], place: str) -> S:
    return check(kind, {str(key): value for key, value in data.items()}, place)


def _known_keys() -> dict[str, tuple[str, ...]]:
    """Section -> its keys, to say where a misplaced key belongs."""
    known = {name: tuple(kind.model_fields) for name, kind in SECTIONS.items()}
    return known | {"training": (*known["training"], *PLAN_KEYS)}


def _fill_size(found: dict[str, dict[str, Any]], size: str) -> None:
    """Put what hardware.preset stands for where the experiment is silent."""
    keys = dict(cluster_sizes()[size])
    num_nodes = keys.pop("num_nodes")
    if "cluster" in found["hardware"]:
        keys.pop("gpu_model")
    found["hardware"] = {**keys, **found["hardware"]}
    found["training"] = {"num_nodes": num_nodes, **found["training"]}


def _assembled(sections: _Sections, place: str, name: str) -> Request:
    hardware, training = sections.hardware, sections.training
    base = base_cluster(hardware, f"{place}: hardware")
    model, own_length = model_of(sections.model, f"{place}: model")
    has_tokens = not isinstance(model, LayeredModel)
    sample = model.sample if isinstance(model, LayeredModel) else "sequence"
    node_size = hardware.num_gpus_per_node or base.node_size
    num_nodes = training.num_nodes or 1
    n_gpus = num_nodes * node_size
    if num_nodes > 1 and len(base.links) == 1 and hardware.network_bandwidth_gbps is None:
        raise ForerunError(
            f"{place}: hardware: key 'network_bandwidth_gbps' is missing; {base.name} has no link between nodes"
        )
    kinds = rank_kinds(hardware, n_gpus, node_size, f"{place}: hardware")
    at_training = f"{place}: training"
    fields = agreed(training, sections.plan_keys, sections.model.sequence_length, at_training)
    devices = (base.device, *(kind.device for kind in kinds if kind.device))
    precision = precision_of(
        fields.get("precision", training.mixed_precision), devices, is_convolutional(model), at_training
    )
    cluster = adapted(base, hardware, sections.network, peak_dtype(precision), f"{place}: hardware")
    pattern = pattern_of(training.communication_pattern, f"{at_training}: communication_pattern")
    defaults = {"seq_len": own_length, **DEFAULTS_BY_KIND["images" if is_convolutional(model) else "tokens"]}
    values = open_axes({**defaults, **fields, "precision": precision}, pattern.zero_stage if pattern else 0)
    plan = plan_of(values, n_gpus, at_training)
    setup = Setup(
        model,
        plan,
        cluster,
        network=network_of(sections.network, cluster, num_nodes, n_gpus, f"{place}: network"),
        pattern=pattern_in_force(pattern, sections.network, plan, at_training),
        kinds=kinds,
        slow_links=hardware.slow_links,
    )
    with at(at_training):
        check_plan(model, plan, cluster)
    check_buckets(model, plan, at_training)
    schedules = schedules_of(training, has_tokens, at_training)
    for start, each in schedules.segments(setup):
        with at(f"{at_training}: batch_schedule and sequence_length_schedule: from iteration {start} on"):
            check_plan(model, each.plan, cluster)
    disturbance = disturbance_of(training, hardware, at_training)
    prices = prices_of(sections.prices, Path(), f"{place}: prices", {base.name, *(each.name for each in devices)})
    return Request(
        name=name,
        setup=setup,
        num_iterations=iterations_of(training, setup, schedules, has_tokens, at_training),
        batch_schedule=schedules.batch,
        seq_len_schedule=schedules.seq_len,
        disturbance=disturbance,
        thresholds=Thresholds(**sections.thresholds.model_dump()),
        prices=prices,
        sample=sample,
        config={
            "hardware": hardware_config(hardware, node_size),
            "model": model_config(sections.model, model, plan.seq_len),
            "training": training_config(training, sections.plan_keys, values, plan, disturbance, num_nodes),
            "network": network_config(sections.network),
            "prices": prices_config(sections.prices, prices),
            "thresholds": sections.thresholds.model_dump(),
        },
        echo=echo_of(setup, peak_dtype(precision), base.device.memory_bytes, sample),
    )


def _handler(given: object, place: str) -> object:
    """An event handler; a class is called."""
    if isinstance(given, str):
        if not is_own_code(given):
            raise ForerunError(f"{place}: expected FILE.py:NAME, got {given!r:.60}")
        given = load_own(given, place)
    try:
        handler = given() if isinstance(given, type) else given
    except Exception as error:
        raise ForerunError(f"{place}: {given}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    if not isinstance(handler, EventHandler):
        raise ForerunError(f"{place}: {handler!r:.60} is no EventHandler, subclass or function subscribed with @on")
    return handler


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
