"""The sections of an experiment against their schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from forerun.answers.experiment.description.hardware import hardware_presets
from forerun.answers.experiment.description.sections import (
    PLAN_KEYS,
    HardwareSection,
    ModelSection,
    NetworkSection,
    Section,
    ThresholdsSection,
    TrainingSection,
)
from forerun.answers.experiment.description.text import refuse_unknown
from forerun.answers.experiment.description.training import bounded
from forerun.answers.experiment.prices import PricesSection
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import check
from forerun.describe.plan.fields import plan_fields

SECTIONS: dict[str, type[Any]] = {
    "hardware": HardwareSection,
    "model": ModelSection,
    "training": TrainingSection,
    "network": NetworkSection,
    "prices": PricesSection,
    "thresholds": ThresholdsSection,
}
"""section -> its schema, in order"""
_NEEDED = ("hardware", "model", "training")
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Sections:
    """The sections, checked one by one."""

    hardware: HardwareSection
    model: ModelSection
    training: TrainingSection
    plan_keys: dict[str, Any]
    network: NetworkSection
    thresholds: ThresholdsSection
    prices: dict[str, Any]


def checked(data: Mapping[str, Any], place: str) -> Sections:
    """Returns the sections of `data`, each key checked by itself.

    Raises ForerunError if a section or key is missing or unknown, or has a value that it can't have.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        if name in _NEEDED and name not in data:
            raise ForerunError(f"{place}: section {name!r} is missing; an experiment needs {', '.join(_NEEDED)}")
        value = {} if data.get(name) is None else data[name]
        if not isinstance(value, dict):
            raise ForerunError(f"{place}: {name}: expected keys and values, got {type(value).__name__} {value!r:.40}")
        known = [*SECTIONS[name].model_fields, *(PLAN_KEYS if name == "training" else ())]
        refuse_unknown(value, known, known_keys(), f"{place}: {name}")
        found[name] = value
    preset = _section(HardwareSection, {"preset": found["hardware"].get("preset")}, f"{place}: hardware").preset
    if preset is not None:
        _fill_preset(found, preset)
    training = found["training"]
    own = {key: value for key, value in training.items() if key not in PLAN_KEYS}
    plan_keys = {key: value for key, value in training.items() if key in PLAN_KEYS}
    return Sections(
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


def known_keys() -> dict[str, tuple[str, ...]]:
    """Returns section -> its keys, to say where a misplaced key belongs."""
    known = {name: tuple(kind.model_fields) for name, kind in SECTIONS.items()}
    return known | {"training": (*known["training"], *PLAN_KEYS)}


def _fill_preset(found: dict[str, dict[str, Any]], name: str) -> None:
    """Adds the keys of hardware.preset that the experiment does not give."""
    keys, hardware = dict(hardware_presets()[name]), found["hardware"]
    nodes = {"num_nodes": keys.pop("num_nodes")} if "num_nodes" in keys else {}
    for own, other in (("cluster", "gpu_model"), ("network_bandwidth_gbps", "network_bandwidth")):
        if hardware.get(own) is not None:
            keys.pop(other, None)
    found["hardware"] = {**keys, **hardware}
    found["training"] = {**nodes, **found["training"]}
