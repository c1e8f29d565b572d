"""Reads YAML files into checked entries; each mistake becomes one line that names the file and the key."""

from __future__ import annotations

import contextlib
import difflib
import re
import reprlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from forerun.common.admission import DEEPEST, admit, read_text
from forerun.common.errors import ForerunError
from forerun.common.parsed_yaml import parsed_ahead


class Entry(BaseModel):
    """A mapping in a file. It refuses unknown keys and never reads text as a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    page: ClassVar[str] = ""
    """the page that explains the keys"""


_KIND_OF_VALUE = re.compile(
    r"(constrained|function|nullable|lax-or-strict|json-or-python)-?.*|(dict|list|literal)\[.*|str|int|float|bool"
)
"""what pydantic puts among the keys of an error's place to say which of a value's possible types it tried"""
EntryType = TypeVar("EntryType", bound=Entry)


class _KeysOnce(yaml.constructor.SafeConstructor):
    """Refuses a key that is given twice; plain YAML silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Loader(_KeysOnce, yaml.SafeLoader):
    """Reads with the parser in Python."""


class _FastLoader(_KeysOnce, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads with libyaml's parser, which is eight times as fast, where PyYAML was built with it."""


_MOST_FAST = 1 << 15
"""characters; in a longer text mappings can nest so deeply that libyaml's recursion overflows the stack"""
_MOST_BYTES = 1 << 23
"""largest YAML file; PyYAML reads 0.5 MB a second or so"""
_MOST_REPEATED = 100_000
"""values by which aliases and merge keys may make a text longer"""
_NO_THOUSANDS = re.compile(r"(?![0-9]{1,3}(?:_[0-9]{3})+$)[0-9]+(?:_[0-9]+)+$")
"""1_000 is a number; 32_1_2 is text, though YAML 1.1 drops every underscore"""
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,2}")
"""a number with an exponent, which YAML 1.1 takes for text unless it has a point and a sign"""
_Loader.yaml_implicit_resolvers = _FastLoader.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", _NO_THOUSANDS), *resolvers] if first in "0123456789" else resolvers
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_any_yaml(path: str | Path) -> Any:
    """Returns the contents of a YAML (or JSON) file, whatever their type. Raises ForerunError as `read_yaml` does."""
    return parse_any_yaml(read_text(path, _MOST_BYTES), str(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises ForerunError, which names the file and where possible the line, for a file that is unreadable, not UTF-8 or
    not YAML, gives a key twice, or has no mapping at the top.
    """
    return parse_yaml(read_text(path, _MOST_BYTES), str(path))


def parse_yaml(text: str, place: str) -> dict[str, Any]:
    """Returns the mapping in a YAML text. Raises ForerunError as `read_yaml` does, with `place` as the file's name."""
    data = parse_any_yaml(text, place)
    if not isinstance(data, dict):
        raise ForerunError(f"{place}: expected keys and values, got {_short(data)}")
    return {str(key): value for key, value in data.items()}


def parse_any_yaml(text: str, place: str) -> Any:
    """Returns the contents of a YAML text, whatever their type. Raises ForerunError as `read_yaml` does."""
    known = parsed_ahead(text)
    if known is not None:
        return known
    try:
        data = _loaded(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise ForerunError(f"{place}{where}: not valid YAML: {' '.join(problem.split())}") from None
    except RecursionError:
        raise ForerunError(f"{place}: not valid YAML: {_TOO_DEEP}") from None
    except ForerunError as error:
        raise ForerunError(f"{place}{error}") from None
    except _WRONG_TAG as error:  # PyYAML takes a tag such as !!int at its word
        raise ForerunError(f"{place}: not valid YAML: a value is not of its tag's type ({error})") from None
    admit(data, place)
    return data


_TOO_DEEP = f"lists and mappings lie more than {DEEPEST} levels deep"
_WRONG_TAG = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


def _loaded(text: str) -> Any:
    """Returns the contents of a YAML text. What is wrong with one, the parser in Python says, in its own words."""
    if len(text) > _MOST_FAST:
        _refuse_deep(text)
        return _constructed(_FastLoader, text)
    with contextlib.suppress(yaml.YAMLError):
        return _constructed(_FastLoader, text)
    return _constructed(_Loader, text)


def _refuse_deep(text: str) -> None:
    """Raises ForerunError for a text that nests too deeply; parsing events takes no recursion."""
    depth = 0
    for event in yaml.parse(text, Loader=_FastLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ForerunError(f", line {_line(event)}: not valid YAML: {_TOO_DEEP}")


def _constructed(kind: Any, text: str) -> Any:
    """Returns the contents of a text once the nodes that it consists of are known to be no bomb."""
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_bombs(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _refuse_bombs(root: yaml.Node) -> None:
    """Raises ForerunError for a value that contains itself, and for aliases that make a text much longer.

    The number of values that a node stands for is counted once for each node, after those in it.
    """
    values: dict[int, int] = {}
    above: set[int] = set()
    waiting: list[tuple[yaml.Node, bool]] = [(root, False)]
    while waiting:
        node, is_done = waiting.pop()
        own = id(node)
        if is_done:
            above.discard(own)
            values[own] = 1 + sum(values[id(part)] for part in _parts(node))
            if values[own] > len(values) + _MOST_REPEATED:
                said = f"aliases repeat more than {_MOST_REPEATED:,} values; write out what is meant"
                raise ForerunError(f", line {_line(node)}: {said}")
            continue
        if own in values:
            continue
        if own in above:
            raise ForerunError(f", line {_line(node)}: a value contains itself; remove the alias in it")
        above.add(own)
        waiting.append((node, True))
        waiting += [(part, False) for part in _parts(node) if id(part) not in values]


def _line(part: Any) -> int:
    return int(part.start_mark.line) + 1


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def check(model: type[EntryType], data: dict[str, Any], place: str) -> EntryType:
    """Returns `data` as a `model`. Raises ForerunError with `place`, the first wrong key and the number of others."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # An unknown key is often the one that is missing, misspelt.
        first = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
        path = [str(part) for part in first["loc"] if not _KIND_OF_VALUE.fullmatch(str(part))]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        page = f"; {model.page} explains the keys" if model.page else ""
        raise ForerunError(f"{place}: {' '.join(_explain(model, path, first).split())}{more}{page}") from None


def _explain(model: type[Entry], path: list[str], problem: Any) -> str:
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(model, path[:-1])
        close = difflib.get_close_matches(path[-1], known, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"unknown key {key!r}; {hint}known: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"key {key!r} is missing"
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{key}: {message}" if key else message
    given = problem["input"]
    if problem["type"] in ("float_type", "int_type") and isinstance(given, str) and _EXPONENT.fullmatch(given):
        return f"{key}: YAML reads {given} as text; write {_as_yaml(given, problem['type'])}"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{key}: expected keys and values, got {_short(problem['input'])}"
    return f"{key}: {problem['msg'][0].lower()}{problem['msg'][1:]}, got {_short(problem['input'])}"


def _as_yaml(text: str, kind: str) -> str:
    """Returns a number with an exponent as YAML 1.1 wants it: 2e9 is 2.0e+9, or 2000000000 if it should be whole."""
    if kind == "int_type" and float(text).is_integer():
        return f"{float(text):.0f}"
    mantissa, exponent = text.lower().split("e")
    point = "" if "." in mantissa else ".0"
    sign = "" if exponent[0] in "+-" else "+"
    return f"{mantissa}{point}e{sign}{exponent}"


def _known_keys(model: type[BaseModel], path: list[str]) -> list[str]:
    """Returns the known keys of the mapping at `path`, which consists of keys and list indices."""
    for part in path:
        if part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation))
    return sorted(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


_SHORT = 60


class _Glance(reprlib.Repr):
    """A shortened repr: an error shows a value without reading all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 20
        self.maxstring = self.maxother = 2 * _SHORT

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 8 * _SHORT else f"a number of {x.bit_length()} bits"


def _short(value: Any) -> str:
    text = " ".join(_Glance().repr(value).split())
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."
