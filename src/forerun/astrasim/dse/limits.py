"""Memory limits, in the unit in which they are given."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from forerun.common.errors import ForerunError
from forerun.common.units import GIB, GIGA

BYTES_OF_UNIT = {"GiB": GIB, "GB": GIGA}
_TEXT = re.compile(rf"([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(BYTES_OF_UNIT)})")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory of a rank."""

    size: float
    unit: str = "GiB"

    def __str__(self) -> str:
        return f"{self.size:g} {self.unit}"

    @property
    def gib(self) -> float:
        return self.size * BYTES_OF_UNIT[self.unit] / GIB


def limit_from(text: Any, gib: float | None, place: str) -> MemoryLimit | None:
    """Reads the limit of the keys `memory_limit` (such as `80 GB`) and `memory_limit_gib` (a number); None if unset.

    Raises ForerunError if both are given, the text has no unit, or the size is not above 0; `place` is named.
    """
    if text is None:
        if gib is not None and not gib > 0:
            raise ForerunError(f"{place}memory_limit_gib: give a number above 0, got {gib}")
        return None if gib is None else MemoryLimit(gib)
    if gib is not None:
        raise ForerunError(f"{place}memory_limit: give either it or memory_limit_gib, not both")
    match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
    if not match or not float(match[1]) > 0:
        raise ForerunError(
            f"{place}memory_limit: give a size above 0 with its unit, as 80 GB (10^9 bytes) or 64 GiB (2^30), "
            f"got {str(text)[:60]!r}"
        )
    return MemoryLimit(float(match[1]), match[2])
