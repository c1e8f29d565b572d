"""Reads and writes a ModelSpec as plain fields, as presets and users' own YAML files hold it.

The keys are those of ModelSpec (and MoESpec under `moe`, MLASpec under `mla`). `n_kv_heads` may be left out where it
equals `n_heads`, and `head_dim` where it is hidden / n_heads. Further keys: `source`; `parameters`, the published
count; `parameters_billion`, a rounded published count, as text with its digits. A published count that differs from
that of the fields is an error.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from forerun.common.errors import at
from forerun.describe.model.fields import Fields, read_yaml
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import MLASpec, ModelSpec, MoESpec

_PUBLISHED = ("parameters", "parameters_billion")
_MOST_PARAMETERS = 10**15


def load_spec_file(path: Path) -> ModelSpec:
    """Returns the model in a YAML file, named by its `name` or else by the file. ForerunError names file and key."""
    document = read_yaml(path)
    return read_spec(document, document.text("name", path.stem))


def read_spec(document: Fields, name: str) -> ModelSpec:
    """Returns the model in `document`. Raises ForerunError for an unknown, missing, mistyped or impossible key."""
    values = _values(ModelSpec, document, {"name": name} | _head_defaults(document))
    document.text("source", "")
    document.finish(_PUBLISHED)
    with at(document.place):
        spec = ModelSpec(**values)
    _check_published_count(document, spec)
    return spec


def spec_mapping(spec: ModelSpec | MoESpec | MLASpec) -> dict[str, object]:
    """Returns the fields from which `read_spec` makes the same model, without those at their default."""
    mapping: dict[str, object] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value != field.default:
            mapping[field.name] = spec_mapping(value) if isinstance(value, (MoESpec, MLASpec)) else value
    return mapping


def even_head_dim(document: Fields, hidden: int, n_heads: int) -> int:
    """Returns hidden / n_heads. Raises ForerunError where that is not whole."""
    if hidden % n_heads:
        raise document.error("head_dim", f"is not stated, and {n_heads} heads do not divide {hidden}; state it")
    return hidden // n_heads


def _head_defaults(document: Fields) -> dict[str, int]:
    n_heads = document.integer("n_heads", least=0)
    defaults = {} if document.stated("n_kv_heads") else {"n_kv_heads": n_heads}
    if not document.stated("head_dim"):
        latent = document.section("mla")
        if latent:
            defaults["head_dim"] = latent.integer("v_head_dim")
        else:
            defaults["head_dim"] = even_head_dim(document, document.integer("hidden"), n_heads) if n_heads else 0
    return defaults


def _values(kind: type[Any], document: Fields, given: dict[str, Any]) -> dict[str, Any]:
    """Returns a value for each field of dataclass `kind`, from `given` or else from `document`."""
    hints = get_type_hints(kind)
    return {
        field.name: given[field.name] if field.name in given else _value(document, field, hints[field.name])
        for field in fields(kind)
    }


def _value(document: Fields, field: Field[Any], hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (option for option in get_args(hint) if option is not type(None))
        return _optional(document, field.name, inner)
    default: Any = field.default
    if hint is bool:
        return document.flag(field.name, default)
    if hint is int:
        return document.integer(field.name, least=0) if default is MISSING else document.integer(field.name, default, 0)
    if get_origin(hint) is Literal:
        return document.text(field.name, default, get_args(hint))
    raise TypeError(f"no reader for field {field.name} of type {hint}")


def _optional(document: Fields, key: str, inner: Any) -> Any:
    if inner is int:
        return document.integer(key) if document.stated(key) else None
    if inner is float:
        return document.number(key)
    section = document.section(key)
    if section is None:
        return None
    values = _values(inner, section, {})
    section.finish()
    with at(document.place):
        return inner(**values)


def _check_published_count(document: Fields, spec: ModelSpec) -> None:
    count = parameter_count(spec)
    if document.stated("parameters"):
        published_count = document.integer("parameters", most=_MOST_PARAMETERS)
        if published_count != count:
            raise document.error("parameters", f"says {published_count}, but the fields give {count}")
    if document.stated("parameters_billion"):
        published = document.text("parameters_billion")
        digits = len(published.partition(".")[2])
        if f"{count / 1e9:.{digits}f}" != published:
            raise document.error("parameters_billion", f"says {published}, but the fields give {count}")
