"""Describes the arguments and the result of a compiled function as plain data for JSON.

A layout is `"int"`, `"float"`, `"bool"`, `["array", dtype, dimensions]`, `["tuple", class, [layout, ...]]` or None. A
dtype has a form that `numpy.dtype` reads: a name, or the fields of a record. The class of a named tuple is
`module:name`, and empty for a plain tuple.

A call passes one word of 64 bits for each leaf, in order: the value of an int or a bool, the address of the Python
object of a float or an array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

Layout: TypeAlias = Any


def layout_of(value: object) -> Layout:
    """Returns the layout of an argument or a result.

    Raises:
        TypeError: compiled functions that load without numba don't take such a value.
    """
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, (int, np.integer)):
        return "int"
    if isinstance(value, (float, np.floating)):
        return "float"
    if isinstance(value, np.ndarray):
        if not (value.flags.c_contiguous and value.flags.aligned):
            raise TypeError("an array that is not contiguous")
        return ["array", _written(value.dtype), value.ndim]
    if isinstance(value, tuple):
        named = type(value) is not tuple
        return [
            "tuple",
            f"{type(value).__module__}:{type(value).__qualname__}" if named else "",
            [*map(layout_of, value)],
        ]
    raise TypeError(f"a {type(value).__name__}")


def _written(dtype: np.dtype[Any]) -> Any:
    if dtype.names is None:
        return dtype.str
    known: Any = dtype.fields
    fields = [known[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_written(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }


def class_of(name: str) -> Any:
    """Returns the class of a tuple that a layout names."""
    if not name:
        return tuple
    module, _, qualname = name.partition(":")
    return getattr(import_module(module), qualname)


def leaves(layouts: Sequence[Layout]) -> Iterator[Layout]:
    """Yields the layouts of the words that values of these layouts take."""
    for layout in layouts:
        if isinstance(layout, list) and layout[0] == "tuple":
            yield from leaves(layout[2])
        elif layout is not None:
            yield layout


def n_result_words(result: Layout) -> int:
    """Returns how many words a shim writes for a result of this layout."""
    return sum(2 + leaf[2] if is_array(leaf) else 1 for leaf in leaves([result]))


def is_record(leaf: Layout) -> bool:
    """Returns whether a leaf is an array of records."""
    return is_array(leaf) and isinstance(leaf[1], dict)


def is_array(layout: Layout) -> bool:
    """Returns whether a leaf is an array."""
    return isinstance(layout, list)
