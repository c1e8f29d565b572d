"""Loads shipped stacks by name and a user's own by path, and finds a stack by the words of a table of measurements.

A file with `extends: NAME` states only what differs from that stack. Its sections `search` and `fitted` are merged with
the extended stack's key by key, its other keys replace them, and `names`, `imports`, `description` and `today` are
not taken over.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from forerun.common.admission import read_text
from forerun.common.errors import ForerunError, UnknownName
from forerun.common.shipped import validated
from forerun.common.yaml_files import parse_any_yaml
from forerun.describe.stacks.stack import Stack

DEFAULT_STACK = "torchtitan"
UNKNOWN_STACK = "other"
"""the stack of software that no other stack describes"""
OWN_FOLDER = "FORERUN_STACKS"
"""environment variable that names a folder of further stacks"""
_SUFFIXES = (".yaml", ".yml")
_MERGED = ("search", "fitted")
_RATES = ("memory_rate", "network_rate")
_MOST_RATE = 1000
_OWN = ("names", "imports", "description", "today")
"""keys that a stack does not take over from the one that it extends"""
_SHIPPED = Path(str(resources.files("forerun.describe.stacks"))) / "frameworks"


def stack_names() -> list[str]:
    """Returns the sorted names of the shipped stacks and of those in the folder that FORERUN_STACKS names."""
    return sorted(_files(os.environ.get(OWN_FOLDER, "")))


def load_stack(name: str) -> Stack:
    """Returns the stack called `name`, or that of the file whose path is `name`.

    Raises UnknownName, which lists the known stacks, or ForerunError, which names the file and the wrong key.
    """
    path = _path_of(name, "")
    kept = _kept.get(path)
    if kept is None or any(_changed_ns(file) != ns for file, ns in kept.files.items()):
        kept = _kept[path] = _read(path)
    return kept.stack


def own_stack(name: str) -> Stack | None:
    """Returns the stack called `name` where its file is the user's; None for a shipped stack."""
    stack = load_stack(name)
    return None if Path(_path_of(name, "")).parent == _SHIPPED else stack


def named_by(columns: Mapping[str, str]) -> str | None:
    """Returns the stack that the columns `framework`, `software` and `notes` of a table name; None if none matches.

    Of several the most exact one wins: its patterns cover the most letters of `framework`, then of `software`, then of
    `notes`. Of equals the first in the alphabet wins.
    """
    found = {
        name: max((one.letters_in(columns) for one in load_stack(name).names), default=()) for name in stack_names()
    }
    best = max(found, key=lambda name: found[name])
    return best if found[best] else None


def generations(name: str) -> tuple[str, ...]:
    """Returns the stacks that describe the framework of the stack `name` at different times, from today's back.

    They extend each other and are told by the same words for the framework.
    """
    words = {one.framework for one in load_stack(name).names}
    family = [other for other in stack_names() if words & {one.framework for one in load_stack(other).names}]
    chain = [other for other in family if name in (other, *load_stack(other).lineage)]
    return tuple(sorted(chain, key=lambda other: len(load_stack(other).lineage)))


def imported_by(modules: Collection[str]) -> str | None:
    """Returns the stack that the modules of a program tell; None if none does. Of several the most exact name wins,
    of equals the first in the alphabet."""
    known = set(modules)
    found = {name: max(map(len, known.intersection(load_stack(name).imports)), default=0) for name in stack_names()}
    best = max(found, key=lambda name: found[name])
    return best if found[best] else None


@cache
def _files(own_folder: str) -> dict[str, str]:
    """Returns the file of every stack by name."""
    folders = [_SHIPPED, *([Path(own_folder).expanduser()] if own_folder else [])]
    try:
        paths = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES]
    except OSError as error:
        raise ForerunError(f"{OWN_FOLDER} {own_folder}: {error.strerror or error}; name a folder of stacks") from None
    return {path.stem.lower(): str(path) for path in paths}


def _path_of(name: str, beside: str) -> str:
    """Returns the file of stack `name`; a relative path starts in the folder `beside`."""
    if name.endswith(_SUFFIXES):
        return os.path.join(beside, os.path.expanduser(name))
    found = _files(os.environ.get(OWN_FOLDER, "")).get(name.lower())
    if found is None:
        raise UnknownName("stack", name, stack_names(), "forerun stacks")
    return found


class _Kept(NamedTuple):
    """A stack that was read, with the times of its files, which show whether it must be read again."""

    stack: Stack
    files: dict[str, int]
    """the user's files that it was read from -> their times of modification in ns"""


_kept: dict[str, _Kept] = {}
"""path of a stack -> the stack as it was last read"""


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise ForerunError(
            f"stack {path}: {error.strerror or error}; give a stack of `forerun stacks` or a file"
        ) from None


def _read(path: str) -> _Kept:
    """Reads the stack of the file `path` and those that it extends. Shipped files don't change while Forerun runs."""
    files: dict[str, int] = {}
    data = _merged(path, (), files)
    try:
        stack: Stack = validated(Stack, {"family": data["name"], **data}, f"stack {path}")
        for name in _RATES:
            if not 0 < getattr(stack, name) < _MOST_RATE:
                raise ForerunError(f"stack {path}: {name} must be above 0 and below {_MOST_RATE:,}")
        return _Kept(stack, files)
    except ForerunError as error:
        raise ForerunError(f"{error}; docs/extending.md lists what a stack holds") from None


def _merged(path: str, above: tuple[str, ...], files: dict[str, int]) -> dict[str, Any]:
    """Returns the keys of the file `path` over those of the stack that it extends; the files `above` extend it.

    Adds the user's files that it reads to `files`, with their times of modification.
    """
    if path in above:
        raise ForerunError(f"stack {path}: extends itself over {', '.join(above)}; remove one extends")
    if os.path.dirname(path) != str(_SHIPPED):
        files[path] = _changed_ns(path)
    data = parse_any_yaml(read_text(path), f"stack {path}")
    if not isinstance(data, dict):
        raise ForerunError(f"stack {path}: expected keys with values, as `norm: fused`")
    if not isinstance(data.get("extends", ""), str):
        raise ForerunError(f"stack {path}: extends: expected the name of a stack, or a path")
    if isinstance(data.get("search"), str):
        data["search"] = _base(path, data["search"], "search", above, files).get("search")
    data["name"] = Path(path).stem.lower()
    if "extends" not in data:
        return data
    base = _base(path, data.pop("extends"), "extends", above, files)
    data["lineage"] = [base["name"], *base.get("lineage", ())]
    for key in _MERGED:
        if isinstance(base.get(key), dict) and isinstance(data.get(key), dict):
            data[key] = base[key] | data[key]
    return {key: value for key, value in base.items() if key not in _OWN} | data


def _base(path: str, name: str, key: str, above: tuple[str, ...], files: dict[str, int]) -> dict[str, Any]:
    try:
        return _merged(_path_of(name, os.path.dirname(path)), (*above, path), files)
    except UnknownName as error:
        raise ForerunError(f"stack {path}: {key}: {error}") from None
