"""Attributes of a node, independent of the protobuf type that a writer chose for them.

Writers disagree about types: the same attribute is int32 in one trace and uint64 or text in another, and booleans may
be integers. The functions here accept every type that can hold the value.
"""

from __future__ import annotations

from typing import Any

from forerun.astrasim.chakra.schema import UNDECODABLE, AttributeProto

GROUP_SPELLINGS = ("pg_name", "comm_group")
DIMENSION_SPELLINGS = ("involve_dims", "involved_dims", "involved_dim")
"""names of the attributes that say who takes part in a collective, the current name first"""
PARTICIPANTS = (DIMENSION_SPELLINGS[0], GROUP_SPELLINGS[0], *DIMENSION_SPELLINGS[1:], *GROUP_SPELLINGS[1:])
"""all of these in order of precedence"""
_INT64 = 1 << 63
_TRUE, _FALSE = {"true", "yes"}, {"false", "no", ""}

Value = Any
"""a number, text or bytes, a list of them, or None for an attribute without a value"""


def decoded(blob: bytes) -> tuple[str, Value]:
    """Decodes an AttributeProto into its name and value. Raises ValueError if the bytes are no such message."""
    try:
        attribute = AttributeProto.FromString(blob)
    except UNDECODABLE as error:
        raise ValueError(f"an attribute can't be decoded ({error})") from None
    return attribute.name, value_of(attribute)


def value_of(attribute: Any) -> Value:
    """Returns the value of an AttributeProto. Lists become Python lists."""
    kind = attribute.WhichOneof("value")
    if kind is None:
        return None
    value = getattr(attribute, kind)
    return list(value.values) if kind.endswith("_list") else value


def participants_attribute(attributes: dict[str, Value]) -> str | None:
    """Returns the name of the attribute that says who takes part in a collective, or None.

    Dimensions take precedence over a group, and current names over older ones.
    """
    return next((name for name in PARTICIPANTS if attributes.get(name) is not None), None)


def whole_number(value: Value, name: str) -> int:
    """Converts `value` to a whole number of 64 bits; a float or a text loses its fraction.

    Raises ValueError, naming the attribute `name`, if that fails.
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
        raise ValueError(f"{name} is {_short(value)}, not a number") from None
    if not -_INT64 <= number < _INT64:
        raise ValueError(f"{name} is {_short(value)}, which does not fit in 64 bits")
    return number


def truth(value: Value, name: str) -> bool:
    """Converts a boolean, a number or a text to a boolean. Raises ValueError if that fails."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
    return whole_number(value, name) != 0


def is_launcher(attributes: dict[str, Value]) -> bool:
    """Returns whether a collective node only launches one from the host: older PyTorch traces mark it as one too.

    Raises ValueError where `is_cpu_op` is neither a boolean nor a number.
    """
    on_host = None if "comm_type" in attributes else attributes.get("is_cpu_op")
    return on_host is not None and truth(on_host, "is_cpu_op")


def text_of(value: Value, name: str) -> str:
    """Converts `value` to text, a number in its shortest form. Raises ValueError for a list and for other encodings."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{name} is {_short(value)}, not text") from None
    if isinstance(value, list):
        raise ValueError(f"{name} is {_short(value)}, not text")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


def dimensions(value: Value, name: str) -> tuple[bool, ...]:
    """Converts a list to one boolean for each dimension of the network. Raises ValueError for other values."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_short(value)}, not a list")
    return tuple(truth(item, name) for item in value)


def tensor_list(value: Value, name: str) -> tuple[list[str], list[str]]:
    """Splits a list (name, size, name, size, ...) into names and sizes. Raises ValueError for other values."""
    if value is None:
        return [], []
    if not isinstance(value, list) or len(value) % 2 or (value and not isinstance(value[0], str)):
        raise ValueError(f"{name} is {_short(value)}, not a list of names and sizes")
    return value[::2], value[1::2]


def _short(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
