"""The keys of an experiment file as a table, from the schema that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from forerun.answers.experiment.description.schema import SECTIONS
from forerun.answers.experiment.description.sections import PLAN_KEYS, Section, TopLevel
from forerun.answers.experiment.description.training import SPELLINGS
from forerun.describe.kernels.optimizers import optimizers
from forerun.describe.plan.fields import MEANINGS, choices
from forerun.describe.plan.plan import Plan

_SPELLED = {field: f"training.{key}" for key, field in SPELLINGS.items()} | {"seq_len": "model.sequence_length"}
_MEANINGS = {
    "dp_replicate": (
        "number of data-parallel replicas; -1 uses all remaining GPUs, which is the default without any"
        " data-parallel key"
    ),
    "dp_shard": f"{MEANINGS['dp_shard']}, which is the default if zero_stage is above 0",
    "zero_stage": f"{MEANINGS['zero_stage']}; default: 3 with dp_shard, else 0",
    "optimizer": f"one of {', '.join(optimizers())}; default: sgd for convolutional networks, else adamw",
    "stack": "software stack (forerun stacks); default: pytorch-vision for convolutional networks, else pytorch",
}
_DEPENDENT = ("dp_replicate", "dp_shard", "zero_stage", "optimizer", "stack")
"""keys whose default depends on something, as their meaning says"""


@dataclass(frozen=True)
class KeyRow:
    """One key."""

    section: str
    """"" for keys outside the sections"""
    key: str
    """keys of an entry are written parent.key, those of a list's entries parent[].key"""
    meaning: str
    """in one line, with its unit"""
    default: str
    """as YAML has it; "" where there is none, or where the meaning says what it depends on"""

    @property
    def path(self) -> str:
        """Returns section.key, as --set has it."""
        return f"{self.section}.{self.key}" if self.section else self.key


def key_table() -> list[KeyRow]:
    """Returns a row for each key, in the order of the sections; the keys of a Plan come after the other ones of
    `training`."""
    rows = [*_rows("", TopLevel)]
    for name, kind in SECTIONS.items():
        rows += _rows(name, kind)
        if name == "training":
            rows += [_of_plan(key) for key in PLAN_KEYS]
    return rows


def _rows(section: str, kind: type[Section], prefix: str = "") -> Iterator[KeyRow]:
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        has_keys = isinstance(default, Section)
        shown = "" if field.is_required() or has_keys else _yaml(default)
        yield KeyRow(section, prefix + name, " ".join((field.description or "").split()), shown)
        for entry, is_list in _entries(field.annotation):
            yield from _rows(section, entry, f"{prefix}{name}{'[]' if is_list else ''}.")


def _entries(annotation: Any, is_list: bool = False) -> Iterator[tuple[type[Section], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, is_list
    for part in get_args(annotation):
        yield from _entries(part, is_list or getattr(annotation, "__origin__", None) is list)


def _of_plan(key: str) -> KeyRow:
    if key in _SPELLED:
        return KeyRow("training", key, f"name of {_SPELLED[key]} in a Plan", "")
    default = None if key in _DEPENDENT else Plan.__dataclass_fields__[key].default
    words = [each for each in choices(key) if isinstance(each, str)]
    meaning = MEANINGS[key] + (f": {', '.join(words)}" if words else "")
    return KeyRow("training", key, _MEANINGS.get(key, meaning), _yaml(default))


def _yaml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
