"""Numbers as people write them on a command line: several of them, sizes, and a share of a GPU's memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import inf

from forerun.common.errors import ForerunError
from forerun.common.units import GIB

_MOST = 1000
"""the most numbers of one option"""
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([KMGT]i?B|B)?")
_FACTORS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{unit}": base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for unit, base in (("iB", 1024), ("B", 1000))
}
_LARGEST = 1 << 50
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|min|h|d)?")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_LONGEST_S = 366 * 86_400.0


def whole_numbers(text: str, place: str) -> tuple[int, ...]:
    """Returns the numbers in `64`, `64,96,128`, `64..1024` (doublings of 64), or `64..1024:64` (steps of 64).

    Commas join several of these. The numbers are ascending, each once. Raises ForerunError, which starts with `place`.
    """
    found = sorted({number for part in text.split(",") for number in _numbers(part.strip(), place)})
    if len(found) > _MOST:
        raise _too_many(text, place)
    return tuple(found)


def parse_bytes(text: str) -> int:
    """Returns the bytes in `64MiB` (powers of 1024), `1GB` (powers of 1000) or a plain number.

    Raises ForerunError if it is none of these, no whole number of bytes, or not between 1 byte and 1 PiB.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ForerunError(f"size {text!r}: expected 64MiB, 1GB or a number of bytes")
    number, factor = match[1], _FACTORS[match[2] or ""]
    value = (int(number) if number.isdigit() else float(number)) * factor
    if value != int(value) or not 1 <= value <= _LARGEST:
        raise ForerunError(f"size {text!r}: expected a whole number of bytes between 1 B and 1024 TiB")
    return int(value)


def parse_duration(text: str, place: str) -> float:
    """Returns the seconds in `90s`, `90`, `1.5min` or `2h`.

    Raises ForerunError, which starts with `place`, for another text, no time at all, or more than a year.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2] or "s"] if match else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise ForerunError(f"{place} {text}: expected a time such as 90s, 10min or 2h, at most a year")
    return seconds


def memory_gib(text: str) -> float:
    """Returns the GiB in `70` (GiB), `74.5GiB`, `80GB` (powers of 1000) or `500 MiB`.

    Raises ForerunError for another text.
    """
    try:
        return _gib(text)
    except ValueError:
        raise ForerunError(f"--memory-limit {text}: expected GiB (70) or a size such as 74.5GiB or 80GB") from None


def memory_left(text: str, own_gib: float) -> float:
    """Returns the GiB of `own_gib` that remain if `text` (`10%`, `8`, `8GiB` or `8GB`) is kept free.

    Raises ForerunError for another text, or where nothing is left.
    """
    plain = text.strip()
    try:
        free_gib = float(plain[:-1]) / 100 * own_gib if plain.endswith("%") else _gib(plain)
    except ValueError:
        raise ForerunError(
            f"--headroom: expected GiB (8), a size (8GB) or a share of the memory (10%), got {text!r}"
        ) from None
    if not 0 <= free_gib < own_gib:
        raise ForerunError(f"--headroom {text}: expected at least 0 and less than the {own_gib:.1f} GiB to use")
    return own_gib - free_gib


def share(text: str, option: str) -> float:
    """Returns a share of at least 0 in `2%` or `0.02`. Raises ForerunError, which names `option`, for another text."""
    plain = text.strip()
    try:
        found = float(plain[:-1]) / 100 if plain.endswith("%") else float(plain)
    except ValueError:
        found = -1.0
    if not 0 <= found < inf:
        raise ForerunError(f"{option} {text}: expected a share such as 2% or 0.02")
    return found


def _gib(text: str) -> float:
    """Returns the GiB in a number of them or in a size with a unit. Raises ValueError for another text."""
    match = re.fullmatch(r"(.*?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    factors = {name.lower(): factor / GIB for name, factor in _FACTORS.items() if name} | {"": 1.0}
    if match is None or match[2].lower() not in factors:
        raise ValueError(text)
    return float(match[1]) * factors[match[2].lower()]


def _numbers(part: str, place: str) -> Iterable[int]:
    span, colon, step = part.partition(":")
    low, dots, high = span.partition("..")
    try:
        first, last, by = int(low), int(high if dots else low), int(step) if colon else 0
    except ValueError:
        raise _unclear(part, place) from None
    if (colon and (by < 1 or not dots)) or last < first or (dots and first < 1):
        raise _unclear(part, place)
    if by:
        if (last - first) // by >= _MOST:
            raise _too_many(part, place)
        return range(first, last + 1, by)
    return (first << k for k in range((last // first).bit_length())) if dots else (first,)


def _unclear(part: str, place: str) -> ForerunError:
    ways = "a whole number, 64..1024 (doublings), 64..1024:64 (steps), or several with commas"
    return ForerunError(f"{place}: expected {ways}; got {part!r}")


def _too_many(text: str, place: str) -> ForerunError:
    return ForerunError(f"{place} {text}: more than {_MOST:,} numbers; take larger steps")
