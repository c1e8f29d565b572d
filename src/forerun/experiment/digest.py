"""digest: a name for everything that a simulation depends on; equal for equal content, in any process."""

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

from forerun import __version__
from forerun.experiment.request import Request

_FORMAT = 1
"""goes up when the figures of a point mean something else"""
_SHOWN_ONLY = ("name", "config", "given", "echo", "thresholds")
"""fields of a Request that no simulation depends on"""


def digest(what: str, request: Request, *more: object) -> str:
    """Of a simulation of `request` that is called `what` and depends on `more` besides: 64 hexadecimal digits.

    The version of Forerun is part of it, and the file of every class or function of the user's own.
    """
    parts = [getattr(request, field.name) for field in fields(request) if field.name not in _SHOWN_ONLY]
    text = json.dumps([_FORMAT, __version__, what, content(parts), content(more)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def content(value: object, inside: frozenset[int] = frozenset()) -> Any:
    """`value` as plain data that says all that it holds. `inside` are ids of what holds it."""
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
    """What a function brings along: the object that it is a method of, defaults, variables from around it."""
    cells = getattr(function, "__closure__", None) or ()
    kept = [cell.cell_contents for cell in cells]
    parts = (getattr(function, "__self__", None), getattr(function, "__defaults__", None), kept)
    return [None if inspect.ismodule(part) else content(part, inside) for part in parts]


def _state(value: object) -> object:
    """What makes an object like `value`; its attributes where it can't tell."""
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # an object may raise anything here
        return getattr(value, "__dict__", repr(type(value)))
    return reduced if isinstance(reduced, str) else [part for part in reduced[1:3] if not isinstance(part, Iterator)]


def _named(what: Any) -> list[str]:
    """A class or function: its name, and what its file holds where that is not Forerun's or Python's."""
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
