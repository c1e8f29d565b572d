"""Constants and texts that the package ships in files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any, TypeVar, cast

import pydantic

from forerun.common.errors import ForerunError
from forerun.common.yaml_files import parse_any_yaml

T = TypeVar("T")


def shipped(kind: type[T], package: str, name: str) -> T:
    """Returns the constants of the file `name` of `package`, as an object of the dataclass `kind`.

    Raises ForerunError if a key is missing or unknown, or a value is of the wrong type.
    """
    return cast(T, _loaded(cast(Any, kind), package, name))


@cache
def _loaded(kind: Any, package: str, name: str) -> Any:
    return validated(kind, shipped_data(package, name), name)


@cache
def shipped_data(package: str, name: str) -> Any:
    """Returns the contents of the YAML file `name` of `package`, which the caller must not change."""
    return parse_any_yaml(shipped_text(package, name), name)


def shipped_text(package: str, name: str) -> str:
    """Returns the text of the file `name` of `package`."""
    return (resources.files(package) / name).read_text(encoding="utf-8")


_adapter: Callable[[Any], pydantic.TypeAdapter[Any]] = cache(pydantic.TypeAdapter)


def validated(kind: Any, data: object, place: str) -> Any:
    """Returns `data` as an object of the type `kind`. Raises ForerunError with `place` and the first wrong key."""
    try:
        return _adapter(kind).validate_python(data)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ForerunError(f"{place}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
