"""Reads and writes a ModelSpec as plain fields, as presets and users' own YAML files hold it.

The keys are those of ModelSpec (and of MoESpec under `moe`, MLASpec under `mla`, ScanSpec under `scan`, IndexerSpec
under `indexer`, CompressedSpec under `compressed`, SharedBlockSpec under `shared_block`, EncoderSpec under `encoder`,
with the keys of ModelSpec under its `stack`). `layers` lists the keys that single layers change, with `times` for as
many layers in a row; a list that is shorter than `n_layers` repeats.
`n_kv_heads` may be left out where it equals `n_heads`, and `head_dim` where it is hidden / n_heads. Further keys:
`source`; `parameters`, the published count; `parameters_billion`, a rounded published count, as text with its digits. A
published count that differs from that of the fields is an error.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from forerun.common.errors import ForerunError, at
from forerun.describe.model.compressed import CompressedSpec
from forerun.describe.model.encoder import EncoderSpec
from forerun.describe.model.fields import LARGEST, Fields, read_yaml
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.scan import ScanSpec
from forerun.describe.model.shared_block import SharedBlockSpec
from forerun.describe.model.spec import MOST_LAYERS, IndexerSpec, LayerChanges, MLASpec, ModelSpec, MoESpec
from forerun.describe.model.streams import StreamsSpec

_PUBLISHED = ("parameters", "parameters_billion")
_MOST_PARAMETERS = 10**15
_Part = (
    ModelSpec
    | MoESpec
    | MLASpec
    | ScanSpec
    | IndexerSpec
    | StreamsSpec
    | CompressedSpec
    | SharedBlockSpec
    | EncoderSpec[ModelSpec]
)
_OF_THE_MODEL = (
    "name",
    "n_layers",
    "hidden",
    "vocab",
    "tied_embeddings",
    "layers",
    "notes",
    "mtp_modules",
    "encoder",
    "norm",
    "final_norm",
    "streams",
)
"""fields that no layer changes"""


def load_spec_file(path: Path) -> ModelSpec:
    """Returns the model in a YAML file, named by its `name` or else by the file. ForerunError names file and key."""
    document = read_yaml(path)
    return read_spec(document, document.text("name", path.stem))


def read_spec(document: Fields, name: str) -> ModelSpec:
    """Returns the model in `document`. Raises ForerunError for an unknown, missing, mistyped or impossible key."""
    notes = tuple(f"{document.place}: {note}" for note in document.items("notes"))
    given = {"name": name, "layers": _layers(document), "notes": notes, "encoder": _encoder(document)}
    values = _values(ModelSpec, document, given | _head_defaults(document))
    document.text("source", "")
    document.finish(_PUBLISHED)
    with at(document.place):
        spec = ModelSpec(**values)
    _check_published_count(document, spec)
    return spec


def _encoder(document: Fields) -> EncoderSpec[ModelSpec] | None:
    """Reads the encoder of a model. Its stack has the model's vocabulary where it reads text, and else none."""
    section = document.section("encoder")
    if section is None:
        return None
    stack = section.section("stack")
    if stack is None:
        raise section.error("stack", "is missing: the encoder's layers, with the keys of a model")
    reads_text = section.is_text("reads") and section.text("reads") == "text"
    given: dict[str, Any] = {"name": "encoder", "layers": _layers(stack), "notes": (), "encoder": None}
    given |= {"causal": stack.flag("causal"), "vocab": document.integer("vocab") if reads_text else 1}
    given |= _head_defaults(stack)
    stack_values = _values(ModelSpec, stack, given)
    stack.finish()
    with at(stack.place):
        layers = ModelSpec(**stack_values)
    values = _values(EncoderSpec, section, {"stack": layers})
    section.finish()
    with at(section.place):
        return EncoderSpec(**values)


def spec_mapping(spec: _Part) -> dict[str, object]:
    """Returns the fields from which `read_spec` makes the same model, without those at their default."""
    mapping: dict[str, object] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value != field.default and field.name != "notes":
            mapping[field.name] = _plain(value)
    if isinstance(spec, ModelSpec) and spec.layers:
        mapping["layers"] = [
            {"times": len(list(alike))} | {name: _plain(value) for name, value in changes}
            for changes, alike in groupby(spec.layers)
        ]
    return mapping


def _plain(value: object) -> object:
    """Returns a value of a field as files hold it."""
    if isinstance(value, EncoderSpec):
        stack = spec_mapping(value.stack)
        left_out = {name: stack.pop(name) for name in ("name", "vocab", "causal") if name in stack}
        return spec_mapping(value) | {"stack": stack | ({} if "causal" in left_out else {"causal": True})}
    if is_dataclass(value) and not isinstance(value, type):
        return spec_mapping(cast("_Part", value))
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def even_head_dim(document: Fields, hidden: int, n_heads: int) -> int:
    """Returns hidden / n_heads. Raises ForerunError if that is not whole."""
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


def _layers(document: Fields) -> tuple[LayerChanges, ...]:
    """Reads the changes of single layers."""
    hints = get_type_hints(ModelSpec)
    known = {field.name: field for field in fields(ModelSpec) if field.name not in _OF_THE_MODEL}
    layers: list[LayerChanges] = []
    for number, entry in enumerate(document.items("layers")):
        place = f"{document.place}, in layers, entry {number}"
        if not isinstance(entry, Mapping):
            raise ForerunError(f"{place}: must be keys and values, got {type(entry).__name__}")
        section = Fields(entry, place)
        changed = [name for name in sorted(known) if section.present(name)]
        changes = tuple((name, _value(section, known[name], hints[name])) for name in changed)
        times = section.integer("times", 1)
        if len(layers) + times > MOST_LAYERS:
            raise section.error("times", f"is {times:,}; at most {MOST_LAYERS:,} layers are simulated")
        layers += [changes] * times
        section.finish()
    return tuple(layers)


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
    if hint == tuple[tuple[int, int], ...]:
        return _pairs(document, field.name)
    raise TypeError(f"no reader for field {field.name} of type {hint}")


def _pairs(document: Fields, key: str) -> tuple[tuple[int, int], ...]:
    pairs = document.items(key)
    for pair in pairs:
        whole = isinstance(pair, list | tuple) and [type(size) for size in pair] == [int, int]
        if not whole or not all(1 <= size <= LARGEST for size in pair):  # type: ignore[attr-defined]
            shown = f"{pair!r:.60}"
            raise document.error(key, f"must be a list of pairs of whole numbers from 1 to {LARGEST:,}, got {shown}")
    return tuple((int(pair[0]), int(pair[1])) for pair in pairs)  # type: ignore[index]


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
