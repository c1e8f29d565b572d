"""The content of any Python object as plain data, and digests of it that are the same in every process."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from forerun.common.version import __version__


def content(value: object, inside: frozenset[int] = frozenset()) -> Any:
    """Returns `value` as plain data that JSON can write; `inside` holds the ids of the objects around it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value.hex()
    if id(value) in inside:
        return "what holds this"
    inside |= {id(value)}
    if isinstance(value, Enum):
        return [type(value).__name__, value.name]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
    if isinstance(value, Mapping):
        pairs = [[content(key, inside), content(each, inside)] for key, each in value.items()]
        return ["mapping", sorted(pairs, key=json.dumps)]
    if isinstance(value, (tuple, list)):
        return [content(each, inside) for each in value]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted((content(each, inside) for each in value), key=json.dumps)]
    if isinstance(value, type):
        return _named(value)
    if inspect.isroutine(value):
        return [*_named(value), *_bound(value, inside)]
    if is_dataclass(value):
        values = [[field.name, content(getattr(value, field.name), inside)] for field in fields(value)]
        return [*_named(type(value)), values]
    return [*_named(type(value)), content(_state(value), inside)]


def _bound(function: Any, inside: frozenset[int]) -> list[Any]:
    """Returns the content that a function carries: the object of a method, its defaults, its closure."""
    cells = getattr(function, "__closure__", None) or ()
    kept = [cell.cell_contents for cell in cells]
    parts = (getattr(function, "__self__", None), getattr(function, "__defaults__", None), kept)
    return [None if inspect.ismodule(part) else content(part, inside) for part in parts]


def _state(value: object) -> object:
    """Returns the state that pickle would keep of `value`, or its attributes where it can't be pickled."""
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # a user's class may raise anything here
        return getattr(value, "__dict__", repr(type(value)))
    return reduced if isinstance(reduced, str) else [part for part in reduced[1:3] if not isinstance(part, Iterator)]


def _named(what: Any) -> list[str]:
    """Returns the name of a class or function, with a digest of its file where that belongs to a user."""
    module = str(getattr(what, "__module__", ""))
    name = [module, str(what.__qualname__)]
    return name if module.split(".")[0] in (*sys.stdlib_module_names, "forerun") else [*name, _file_digest(what)]


def _file_digest(what: Any) -> str:
    try:
        path = inspect.getsourcefile(what)
        return "" if path is None else _digest_of_file(path)
    except (TypeError, OSError):
        return ""


@cache
def _digest_of_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@cache
def forerun_digest() -> str:
    """Returns a digest of Forerun's version and of all its files, so that any changed line or constant changes it."""
    root = Path(__file__).parents[1]
    whole = hashlib.sha256(__version__.encode())
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            whole.update(f"\n{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return whole.hexdigest()


def digest_of(*parts: object) -> str:
    """Returns a digest of `parts` and of Forerun itself: 64 hexadecimal digits."""
    text = json.dumps([forerun_digest(), content(parts)])
    return hashlib.sha256(text.encode()).hexdigest()
