"""Attributes of a node, whatever type their writer chose for them.

Writers disagree: the same attribute is int32 in one trace and uint64 or a text in the next, and booleans come as
integers. Here a value is what it says.
"""

from __future__ import annotations

from typing import Any

from forerun.astrasim.chakra.schema import UNDECODABLE, AttributeProto

GROUP_SPELLINGS = ("pg_name", "comm_group")
DIMENSION_SPELLINGS = ("involve_dims", "involved_dims", "involved_dim")
"""names of the attributes that say who takes part in a collective, today's first"""
_WHO = (DIMENSION_SPELLINGS[0], GROUP_SPELLINGS[0], *DIMENSION_SPELLINGS[1:], *GROUP_SPELLINGS[1:])
_INT64 = 1 << 63
_TRUE, _FALSE = {"true", "yes"}, {"false", "no", ""}

Value = Any
"""a number, text or bytes, a list of them, or None for an attribute without a value"""


def decoded(blob: bytes) -> tuple[str, Value]:
    """Name and value of the bytes of an AttributeProto; raises ValueError if they are none."""
    try:
        attribute = AttributeProto.FromString(blob)
    except UNDECODABLE as error:
        raise ValueError(f"an attribute can't be decoded ({error})") from None
    return attribute.name, value_of(attribute)


def value_of(attribute: Any) -> Value:
    """The value of an AttributeProto, lists as Python lists."""
    kind = attribute.WhichOneof("value")
    if kind is None:
        return None
    value = getattr(attribute, kind)
    return list(value.values) if kind.endswith("_list") else value


def said_by(attributes: dict[str, Value]) -> str | None:
    """Name of the attribute that says who takes part in a collective, or None where none does.

    Dimensions go over a group, and today's spellings over older ones.
    """
    return next((name for name in _WHO if attributes.get(name) is not None), None)


def whole_number(value: Value, name: str) -> int:
    """`value` as a whole number of 64 bits; texts count by their integer part, as do floats.

    Raises ValueError, naming the attribute `name`, where it is none.
    """
    if type(value) is int and -_INT64 <= value < _INT64:
        return value
    if isinstance(value, (list, bytes)) and len(value) == 1:
        value = value[0]
    try:
        if isinstance(value, str):
            text = value.strip()
            number = int(text) if text.lstrip("+-").isdecimal() else int(float(text))
        else:
            number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {_short(value)}, which is no number") from None
    if not -_INT64 <= number < _INT64:
        raise ValueError(f"{name} is {_short(value)}, which does not fit in 64 bits")
    return number


def truth(value: Value, name: str) -> bool:
    """`value` as a boolean, which may be written as a number or a text; raises ValueError where it is neither."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
    return whole_number(value, name) != 0


def text_of(value: Value, name: str) -> str:
    """`value` as text, numbers in their shortest form; raises ValueError where it is a list or not UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{name} is {_short(value)}, which is no text") from None
    if isinstance(value, list):
        raise ValueError(f"{name} is {_short(value)}, which is no text")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


def dimensions(value: Value, name: str) -> tuple[bool, ...]:
    """`value` as one boolean a dimension of the network; raises ValueError where it is no list."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_short(value)}, which is no list")
    return tuple(truth(item, name) for item in value)


def tensor_list(value: Value, name: str) -> tuple[list[str], list[str]]:
    """Names and sizes of `value` (name, size, name, size, ...); raises ValueError if it is no such list."""
    if value is None:
        return [], []
    if not isinstance(value, list) or len(value) % 2 or (value and not isinstance(value[0], str)):
        raise ValueError(f"{name} is {_short(value)}, not a list of names and sizes")
    return value[::2], value[1::2]


def _short(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
