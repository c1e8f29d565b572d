"""Constants that the package ships in YAML files."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, TypeVar, cast

import pydantic
import yaml

from forerun.common.errors import ForerunError

T = TypeVar("T")


def shipped(kind: type[T], package: str, name: str) -> T:
    """The constants of the file `name` of `package`, as an object of the dataclass `kind`.

    Raises ForerunError if a key is missing or unknown, or a value is of the wrong type.
    """
    return cast(T, _loaded(cast(Any, kind), package, name))


@cache
def _loaded(kind: Any, package: str, name: str) -> Any:
    text = (resources.files(package) / name).read_text(encoding="utf-8")
    try:
        return pydantic.TypeAdapter(kind).validate_python(yaml.safe_load(text))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ForerunError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
