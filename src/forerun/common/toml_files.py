"""Reads TOML; each mistake becomes one line that names the file and the line."""

from __future__ import annotations

import sys
from typing import Any

from forerun.common.admission import admit
from forerun.common.errors import ForerunError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]


def parse_toml(text: str, place: str) -> dict[str, Any]:
    """Returns the tables of a TOML text. Raises ForerunError, which names `place`, where it is not TOML, and as
    `admission.admit` does."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ForerunError(f"{place}: not TOML: {error}; is it cut short?") from None
    except (RecursionError, ValueError):
        raise ForerunError(f"{place}: not TOML: lists are nested too deeply, or a number is too long") from None
    admit(data, place)
    return data
