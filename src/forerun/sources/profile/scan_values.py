"""Values of JSON in a buffer of bytes: where they end, and the numbers that they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.common.jit import kernel

U8 = npt.NDArray[np.uint8]
_QUOTE, _BACKSLASH, _COMMA, _MINUS, _PLUS, _POINT = (ord(c) for c in '"\\,-+.')
_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST, _ZERO, _NINE = (ord(c) for c in "{}[]09")
_MOST_DIGITS = 18
_LARGEST_US = 9_000_000_000_000_000
"""times beyond do not fit 64 bits in nanoseconds"""


@kernel
def skip_space(buf: U8, pos: int, n: int) -> int:
    """Returns the place of the first byte from `pos` on that is no white space, `n` if there is none."""
    while pos < n and (buf[pos] == 32 or (9 <= buf[pos] <= 13)):
        pos += 1
    return pos


@kernel
def text_end(buf: U8, pos: int, n: int) -> int:
    """Returns the place of the quote that ends the text from `pos` on, -1 if the buffer ends before."""
    while pos < n:
        byte = buf[pos]
        if byte == _QUOTE:
            return pos
        pos += 2 if byte == _BACKSLASH else 1
    return -1


@kernel
def value_end(buf: U8, pos: int, n: int) -> int:
    """Returns the place behind the value at `pos`, -1 if the buffer ends before, -2 if there is none."""
    depth = 0
    while pos < n:
        byte = buf[pos]
        if byte == _QUOTE:
            pos = text_end(buf, pos + 1, n)
            if pos < 0:
                return -1
            if depth == 0:
                return pos + 1
        elif byte in (_OPEN, _OPEN_LIST):
            depth += 1
        elif byte in (_CLOSE, _CLOSE_LIST):
            if depth == 0:
                return -2
            depth -= 1
            if depth == 0:
                return pos + 1
        elif depth == 0:
            start = pos
            while pos < n and not (
                buf[pos] == _COMMA or buf[pos] == _CLOSE or buf[pos] == _CLOSE_LIST or buf[pos] <= 32
            ):
                pos += 1
            if pos == n:
                return -1
            return pos if pos > start else -2
        pos += 1
    return -1


@kernel
def real_number(buf: U8, first: int, end: int) -> tuple[int, float]:
    """Returns (1, value) of a decimal number, (0, ...) if it is none."""
    i = first
    negative = i < end and buf[i] == _MINUS
    if negative:
        i += 1
    value, scale, digits, point = 0.0, 1.0, 0, False
    while i < end and (_ZERO <= buf[i] <= _NINE or (buf[i] == _POINT and not point)):
        if buf[i] == _POINT:
            point = True
        else:
            value = value * 10.0 + (np.int64(buf[i]) - _ZERO)
            digits += 1
            if point:
                scale *= 10.0
        i += 1
    if digits == 0:
        return 0, 0.0
    value /= scale
    if i < end and (buf[i] == 101 or buf[i] == 69):
        i += 1
        down = i < end and buf[i] == _MINUS
        if i < end and (buf[i] == _MINUS or buf[i] == _PLUS):
            i += 1
        power = 0
        while i < end and _ZERO <= buf[i] <= _NINE and power < 1000:
            power = power * 10 + (np.int64(buf[i]) - _ZERO)
            i += 1
        value *= 10.0 ** (-power if down else power)
    if i < end:
        return 0, 0.0
    return 1, -value if negative else value


@kernel
def nanoseconds(buf: U8, first: int, end: int) -> tuple[int, Any, int]:
    """Returns (1, nanoseconds, has a fraction) of a decimal number of microseconds; (0, ...) if it is none."""
    i = first
    negative = i < end and buf[i] == _MINUS
    if negative:
        i += 1
    whole, digits = 0, 0
    while i < end and _ZERO <= buf[i] <= _NINE:
        whole = whole * 10 + (np.int64(buf[i]) - _ZERO)
        digits += 1
        i += 1
        if digits > _MOST_DIGITS:
            return 0, 0, 0
    if digits == 0 or whole > _LARGEST_US:
        return 0, 0, 0
    nanos, fractional = whole * 1000, 0
    if i < end and buf[i] == _POINT:
        fractional = 1
        i += 1
        scale = 100
        place = 0
        while i < end and _ZERO <= buf[i] <= _NINE:
            digit = np.int64(buf[i]) - _ZERO
            if place < 3:
                nanos += digit * scale
                scale //= 10
            elif place == 3 and digit >= 5:
                nanos += 1
            place += 1
            i += 1
        if place == 0:
            return 0, 0, 0
    if i < end:
        ok, real = real_number(buf, first, end)
        if ok == 0 or not abs(real) < _LARGEST_US:
            return 0, 0, 0
        return 1, np.int64(np.round(real * 1000.0)), 1
    return 1, -nanos if negative else nanos, fractional


@kernel
def whole_number(buf: U8, first: int, end: int) -> tuple[int, Any]:
    """Returns (1, value) of a number cut to a whole one, (0, ...) if it is none."""
    i = first
    negative = i < end and buf[i] == _MINUS
    if negative:
        i += 1
    value, digits = 0, 0
    while i < end and _ZERO <= buf[i] <= _NINE and digits <= _MOST_DIGITS:
        value = value * 10 + (np.int64(buf[i]) - _ZERO)
        digits += 1
        i += 1
    if i == end and 0 < digits <= _MOST_DIGITS:
        return 1, -value if negative else value
    ok, real = real_number(buf, first, end)
    if ok == 1 and abs(real) < 9e18:
        return 1, np.int64(real)
    return 0, 0
