"""Numbers as people read them: times, shares, amounts of money, rates."""

from __future__ import annotations


def seconds(time_s: float) -> str:
    """Returns three digits, in s, ms or us."""
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if time_s >= s), ("us", 1e-6))
    value = time_s / size
    return "0 s" if value == 0 else f"{three_digits(value)} {unit}"


def three_digits(value: float) -> str:
    """Returns a number of at least 1 with three significant digits, or all digits before the point if there are
    more."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Returns a share as a percentage with one digit after the point."""
    return "unknown" if share is None else f"{share:.1%}"


def dollars(amount: float | None) -> str:
    """Returns an amount of money to the cent."""
    return "unknown" if amount is None else f"{amount:,.2f}"


def rate(per_s: float | None) -> str:
    """Returns a rate per second as a whole number, or with three digits if it is small."""
    if per_s is None:
        return "unknown"
    return f"{per_s:,.0f}" if per_s >= 100 or per_s == 0 else f"{per_s:.1f}" if per_s >= 10 else f"{per_s:.2f}"
