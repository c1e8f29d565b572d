"""Bandwidths with a unit, as a file states them: 200 GB/s, 1.6 Tbit/s."""

from __future__ import annotations

import re

from forerun.common.units import GIB, GIGA
from forerun.describe.cluster.schema import BITS_PER_BYTE

_TEXT = re.compile(r"(\d+\.?\d*(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z]+(?:/[sS])?)")
_PREFIXES = {"M": 1e6, "G": 1e9, "T": 1e12}
_BITS = ("bit/s", "bits/s", "b/s", "bps")
_BYTES = ("byte/s", "bytes/s", "B/s", "Bps")
_UNITS = {
    **{prefix + unit: size for prefix, size in _PREFIXES.items() for unit in _BITS},
    **{prefix + unit: size * BITS_PER_BYTE for prefix, size in _PREFIXES.items() for unit in _BYTES},
    "GiB/s": float(GIB * BITS_PER_BYTE),
}
"""unit -> bits a second"""
_WORDS = {unit.lower(): size for unit, size in _UNITS.items() if "bit" in unit or "byte" in unit}
"""units whose case does not matter"""


def gbit_s(text: str) -> float:
    """Returns the 10**9 bits a second of a number with its unit.

    Raises ValueError for another text, and where the case of the unit leaves open whether it counts bits or bytes.
    """
    found = _TEXT.fullmatch(text.strip())
    size = _UNITS.get(found[2], _WORDS.get(found[2].lower())) if found else None
    if found is None or size is None:
        raise ValueError(
            f"expected a number with its unit, such as 200 GB/s (bytes) or 200 Gbit/s (bits), got {text!r:.40}"
        )
    return float(found[1]) * size / GIGA
