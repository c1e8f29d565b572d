"""Protobuf's wire format as compiled code reads it: numbers, texts, attributes.

These functions are stricter than protobuf. They read the forms that writers produce as protobuf does, and refuse all
others. protobuf then reads the others, or reports their errors.

source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor

from forerun.astrasim.chakra.schema import AttributeProto
from forerun.common.jit import kernel

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""wire types"""
NO_SPAN, CUT = -1, -2
"""places that say that there is no such value, and that the buffer ends within one"""
NAME_FIRST, NAME_END, FIELD, RAW = range(4)
"""results of `read_attribute`: the place of the name, the number of the field that has the value (0 for none), and the
bits of a number
"""
FIRST, END = 4, 5
"""where the bytes of a value lie that is not a number"""
N_FOUND = 6
_NAME, _DOC = 1, 2
_LONGEST_VARINT, _LONGEST_LENGTH = 10, 5
_VALUES_TAG_BITS = 3
_TYPES = FieldDescriptor
_WIRE_TYPES = {
    **dict.fromkeys((_TYPES.TYPE_INT32, _TYPES.TYPE_INT64, _TYPES.TYPE_UINT32, _TYPES.TYPE_UINT64), VARINT),
    **dict.fromkeys((_TYPES.TYPE_SINT32, _TYPES.TYPE_SINT64, _TYPES.TYPE_BOOL), VARINT),
    **dict.fromkeys((_TYPES.TYPE_FIXED64, _TYPES.TYPE_SFIXED64, _TYPES.TYPE_DOUBLE), FIXED64),
    **dict.fromkeys((_TYPES.TYPE_FIXED32, _TYPES.TYPE_SFIXED32, _TYPES.TYPE_FLOAT), FIXED32),
    **dict.fromkeys((_TYPES.TYPE_STRING, _TYPES.TYPE_BYTES, _TYPES.TYPE_MESSAGE), LENGTH),
}
_DOUBLE, _FLOAT, _BOOL, _STRING = _TYPES.TYPE_DOUBLE, _TYPES.TYPE_FLOAT, _TYPES.TYPE_BOOL, _TYPES.TYPE_STRING
_INT32, _UINT32, _SINT32 = _TYPES.TYPE_INT32, _TYPES.TYPE_UINT32, _TYPES.TYPE_SINT32
_SFIXED32, _FIXED32 = _TYPES.TYPE_SFIXED32, _TYPES.TYPE_FIXED32
_UINT64, _FIXED64, _SINT64 = _TYPES.TYPE_UINT64, _TYPES.TYPE_FIXED64, _TYPES.TYPE_SINT64
_BEYOND_INT64 = 2.0**63


def _types() -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Returns the type of each field of an AttributeProto, and that of a list's elements; 0 if there is none."""
    fields = AttributeProto.DESCRIPTOR.fields
    types, elements = (np.zeros(1 + max(field.number for field in fields), np.int8) for _ in range(2))
    for field in fields:
        types[field.number] = field.type
        if field.message_type is not None:
            elements[field.number] = field.message_type.fields_by_name["values"].type
    return types, elements


_TYPE, _ELEMENT = _types()
_WIRE = np.array([_WIRE_TYPES.get(int(one), -1) for one in _TYPE], np.int8)
_ELEMENT_WIRE = np.array([_WIRE_TYPES.get(int(one), -1) for one in _ELEMENT], np.int8)
_IS_NUMBER = np.isin(_WIRE, (VARINT, FIXED32, FIXED64))
STRING_LIST = int(AttributeProto.DESCRIPTOR.fields_by_name["string_list"].number)


@kernel
def varint(buf: U8, pos: int, end: int) -> tuple[Any, int]:
    """Returns the 64 bits of the varint at `pos`, and the place behind it or `NO_SPAN`."""
    value, shift = np.int64(0), 0
    for i in range(pos, min(end, pos + _LONGEST_VARINT)):
        byte = np.int64(buf[i])
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if shift == 63 and byte > 1:
                return value, NO_SPAN
            return value, i + 1
        shift += 7
    return value, NO_SPAN


@kernel
def length(buf: U8, pos: int, end: int) -> tuple[Any, int]:
    """Returns the length at `pos` and the place behind it; `CUT` if the buffer ends within it, `NO_SPAN` for none."""
    value, shift = np.int64(0), 0
    for i in range(pos, min(end, pos + _LONGEST_LENGTH)):
        byte = np.int64(buf[i])
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, i + 1
        shift += 7
    return value, CUT if end < pos + _LONGEST_LENGTH else NO_SPAN


@kernel
def span(buf: U8, pos: int, end: int) -> tuple[int, int]:
    """Returns the begin and the end of the bytes whose length is at `pos`. The end is `NO_SPAN` if they are not
    complete here.
    """
    size, first = length(buf, pos, end)
    if first < 0 or size > end - first:
        return first, NO_SPAN
    return first, first + size


@kernel
def tag(buf: U8, pos: int, end: int) -> tuple[int, int]:
    """Returns the tag of at most two bytes at `pos`, and the place behind it or `NO_SPAN`."""
    first = np.int64(buf[pos])
    if first < 0x80:
        return first, pos + 1
    if pos + 1 < end and buf[pos + 1] < 0x80:
        return (first & 0x7F) | (np.int64(buf[pos + 1]) << 7), pos + 2
    return 0, NO_SPAN


@kernel
def fixed(buf: U8, pos: int, size: int) -> Any:
    """Returns the bits of the `size` bytes at `pos`, the lowest byte first."""
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(buf[pos + i]) << (8 * i)
    return value


@kernel
def is_text(buf: U8, first: int, end: int) -> bool:
    """Returns whether bytes are UTF-8 as RFC 3629 has it: in the shortest form, no surrogates, at most U+10FFFF."""
    i = first
    while i < end:
        byte = buf[i]
        i += 1
        if byte < 0x80:
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= byte <= 0xDF:
            more = 1
        elif 0xE0 <= byte <= 0xEF:
            more = 2
            if byte == 0xE0:
                low = 0xA0
            elif byte == 0xED:
                high = 0x9F
        elif 0xF0 <= byte <= 0xF4:
            more = 3
            if byte == 0xF0:
                low = 0x90
            elif byte == 0xF4:
                high = 0x8F
        else:
            return False
        if i + more > end or not low <= buf[i] <= high:
            return False
        for k in range(i + 1, i + more):
            if not 0x80 <= buf[k] <= 0xBF:
                return False
        i += more
    return True


@kernel
def _are_numbers(buf: U8, first: int, end: int, wire: int) -> bool:
    """Returns whether bytes are packed numbers of a wire type."""
    if wire == FIXED64:
        return (end - first) % 8 == 0
    if wire == FIXED32:
        return (end - first) % 4 == 0
    while first < end:
        _, first = varint(buf, first, end)
        if first < 0:
            return False
    return True


@kernel
def _is_list(buf: U8, pos: int, end: int, field: int) -> bool:
    """Returns whether bytes are the list of an attribute's field: packed numbers, or texts or bytes one by one."""
    wire = _ELEMENT_WIRE[field]
    while pos < end:
        if buf[pos] != (1 << _VALUES_TAG_BITS | LENGTH):
            return False
        first, pos = span(buf, pos + 1, end)
        if pos < 0:
            return False
        if wire != LENGTH:
            if not _are_numbers(buf, first, pos, wire):
                return False
        elif _ELEMENT[field] == _STRING and not is_text(buf, first, pos):
            return False
    return True


@kernel
def read_attribute(buf: U8, pos: int, end: int, found: I64) -> bool:
    """Reads the AttributeProto `buf[pos:end]` into `found`. Returns False if it isn't one that can be told here.

    The name, the text beside it and the value may each be given once, in any order.
    """
    found[:] = 0
    named = False
    while pos < end:
        key, pos = tag(buf, pos, end)
        field = key >> _VALUES_TAG_BITS
        if pos < 0 or field >= len(_WIRE) or key & 7 != _WIRE[field]:
            return False
        if field > _DOC and found[FIELD] != 0:
            return False
        wire = key & 7
        first = pos
        if wire == VARINT:
            found[RAW], pos = varint(buf, pos, end)
            if pos < 0:
                return False
        elif wire == LENGTH:
            first, pos = span(buf, pos, end)
            if pos < 0:
                return False
            if _TYPE[field] == _STRING:
                if not is_text(buf, first, pos):
                    return False
            elif _ELEMENT[field] != 0 and not _is_list(buf, first, pos, field):
                return False
        else:
            size = 8 if wire == FIXED64 else 4
            if pos + size > end:
                return False
            found[RAW] = fixed(buf, pos, size)
            pos += size
        if field == _NAME:
            if named:
                return False
            named = True
            found[NAME_FIRST], found[NAME_END] = first, pos
        elif field > _DOC:
            found[FIELD], found[FIRST], found[END] = field, first, pos
    return True


@kernel
def whole_number(field: int, raw: Any) -> tuple[bool, Any]:
    """Returns (True, value) of a number with the bits `raw` cut to a whole one; (False, 0) if it is none of 64 bits."""
    kind = _TYPE[field]
    if not _IS_NUMBER[field]:
        return False, np.int64(0)
    low = raw & 0xFFFFFFFF
    if kind in (_DOUBLE, _FLOAT):
        real = np.int64(raw).view(np.float64) if kind == _DOUBLE else np.float64(np.int32(low).view(np.float32))
        if not -_BEYOND_INT64 <= real < _BEYOND_INT64:
            return False, np.int64(0)
        return True, np.int64(real)
    if kind == _BOOL:
        return True, np.int64(raw != 0)
    if kind in (_UINT32, _FIXED32):
        return True, low
    if kind in (_INT32, _SFIXED32):
        return True, low - ((low >> 31) << 32)
    if kind == _SINT32:
        return True, (low >> 1) ^ -(low & 1)
    if kind == _SINT64:
        return True, np.int64(np.uint64(raw) >> np.uint64(1)) ^ -(raw & 1)
    if kind in (_UINT64, _FIXED64):
        return raw >= 0, raw
    return True, raw
