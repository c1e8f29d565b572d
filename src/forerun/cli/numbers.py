"""Numbers as people write them on a command line: several of them, and a share of a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.errors import ForerunError

_MOST = 1000
"""numbers of one option"""


def whole_numbers(text: str, place: str) -> tuple[int, ...]:
    """`64`, `64,96,128`, `64..1024` (doublings of 64), `64..1024:64` (steps of 64), or several of these with commas.

    Ascending, each once. Raises ForerunError, which starts with `place`.
    """
    found = sorted({number for part in text.split(",") for number in _numbers(part.strip(), place)})
    if len(found) > _MOST:
        raise _too_many(text, place)
    return tuple(found)


def memory_left(text: str, own_gib: float) -> float:
    """GiB that are left of `own_gib` when as much is kept free as `text` says: `10%`, `8` or `8GiB`.

    Raises ForerunError for another text, or where nothing is left.
    """
    plain = text.strip().lower().removesuffix("gib").strip()
    try:
        free_gib = float(plain[:-1]) / 100 * own_gib if plain.endswith("%") else float(plain)
    except ValueError:
        raise ForerunError(f"--headroom: expected GiB (8) or a share of the memory (10%), got {text!r}") from None
    if not 0 <= free_gib < own_gib:
        raise ForerunError(f"--headroom {text}: expected at least 0 and less than the {own_gib:.1f} GiB to use")
    return own_gib - free_gib


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
