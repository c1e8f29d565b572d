"""Reads pickles of plain data (lists, dicts, tuples, numbers, texts) without executing anything.

Python's own reader looks up and calls the functions that a file names. This one knows only the codes of containers and
values, so a file that asks for anything else ends in an error. The code that walks containers refuses those that
contain themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forerun.common.admission import read_bytes
from forerun.common.errors import ForerunError

_MOST_BYTES = 1 << 30
_MOST_VALUES = 100_000_000
_LONGEST_NUMBER = 16
"""bytes of a whole number"""
_MARK = object()
_PROTO, _FRAME, _STOP = 0x80, 0x95, ord(".")
_HEADERS = {ord("C"): 1, ord("B"): 4, 0x8E: 8, 0x8C: 1, ord("X"): 4, 0x8D: 8, 0x8A: 1}
"""codes with a length -> bytes of the length: texts, bytes and long numbers"""
_NUMBERS = {ord("K"): "<B", ord("M"): "<H", ord("J"): "<i", ord("G"): ">d"}
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_EMPTY: dict[int, Callable[[], Any]] = {ord("]"): list, ord("}"): dict, ord(")"): tuple, 0x8F: set}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_PUTS, _GETS = {ord("q"): "<B", ord("r"): "<I"}, {ord("h"): "<B", ord("j"): "<I"}
_TEXTS = (0x8C, ord("X"), 0x8D)


def read_plain_pickle(path: str | Path) -> Any:
    """Returns the value in a pickle of plain data.

    Raises ForerunError for a file that is too large, cut short, damaged, or asks for more than plain data.
    """
    try:
        return _read(read_bytes(path, _MOST_BYTES), str(path))
    except ForerunError:  # is a ValueError, and says more
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error, UnicodeDecodeError, AttributeError) as error:
        raise ForerunError(f"{path}: a damaged pickle ({type(error).__name__})") from None


def _read(content: bytes, path: str) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    place = values = 0
    while True:
        if place >= len(content):
            raise ForerunError(f"{path}: the pickle ends before it is complete; is the file cut short?")
        code = content[place]
        place += 1
        values += 1
        if values > _MOST_VALUES:
            raise ForerunError(f"{path}: more than {_MOST_VALUES:,} values")
        if code in _NUMBERS:
            size = struct.calcsize(_NUMBERS[code])
            stack.append(struct.unpack_from(_NUMBERS[code], content, place)[0])
            place += size
        elif code in _HEADERS:
            width = _HEADERS[code]
            length = int.from_bytes(content[place : place + width], "little")
            piece = content[place + width : place + width + length]
            if len(piece) < length or (code == 0x8A and length > _LONGEST_NUMBER):
                raise ForerunError(f"{path}: a value of {length:,} bytes at byte {place}; is the file cut short?")
            stack.append(_value(code, piece))
            place += width + length
        elif code == 0x94:
            memo[len(memo)] = stack[-1]
        elif code in _GETS:
            size = struct.calcsize(_GETS[code])
            stack.append(memo[struct.unpack_from(_GETS[code], content, place)[0]])
            place += size
        elif code in _PUTS:
            size = struct.calcsize(_PUTS[code])
            memo[struct.unpack_from(_PUTS[code], content, place)[0]] = stack[-1]
            place += size
        elif code == ord("("):
            stack.append(_MARK)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code == _PROTO:
            place += 1
        elif code == _FRAME:
            place += 8
        elif code == _STOP:
            if len(stack) != 1 or stack[0] is _MARK:
                raise ForerunError(f"{path}: a damaged pickle, which holds {len(stack)} values")
            return stack[0]
        elif not _fill(code, stack):
            raise ForerunError(
                f"{path}: asks for more than plain data (code {chr(code)!r} at byte {place - 1}); nothing of it was run"
            )


def _value(code: int, piece: bytes) -> Any:
    if code in _TEXTS:
        return piece.decode("utf-8", "surrogatepass")
    return int.from_bytes(piece, "little", signed=True) if code == 0x8A else piece


def _fill(code: int, stack: list[Any]) -> bool:
    """Applies a code that puts values of the stack into a container. Returns False for any other code."""
    if code in _TUPLES:
        size = _TUPLES[code]
        stack[-size:] = [tuple(stack[-size:])]
    elif code == ord("a"):
        last = stack.pop()
        stack[-1].append(last)
    elif code == ord("s"):
        value, key = stack.pop(), stack.pop()
        stack[-1][key] = value
    elif code == ord("e"):
        more = _since_mark(stack)
        stack[-1].extend(more)
    elif code == ord("u"):
        more = _since_mark(stack)
        stack[-1].update(zip(more[::2], more[1::2], strict=True))
    elif code == 0x90:
        more = _since_mark(stack)
        stack[-1].update(more)
    elif code == ord("t"):
        more = _since_mark(stack)
        stack.append(tuple(more))
    elif code == ord("0"):
        stack.pop()
    else:
        return False
    return True


def _since_mark(stack: list[Any]) -> list[Any]:
    """Pops the items above the last mark off the stack, and the mark."""
    place = len(stack) - 1
    while stack[place] is not _MARK:
        place -= 1
        if place < 0:
            raise IndexError
    found = stack[place + 1 :]
    del stack[place:]
    return found
