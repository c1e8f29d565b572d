"""Writes the function that stands between Python objects and a compiled function.

A shim takes the address of words (see `layout`). It checks that each array has the compiled type, and makes numba's
arrays from their addresses. The caller checks the dtypes of records, which are equal without being the same object. The
shim then calls the function, and writes one word for each int, bool or float of the result and `2 + dimensions` words
for each array: the memory to release in the end, the first element, the lengths. `runtime.ll` makes arrays of these.

Only the build imports this module, which needs numba. It relies on the beginning of three C structures whose order the
ABI of CPython (not free-threaded) and of numpy guarantees; the library tests them when it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from forerun.common.native.layout import Layout, class_of, is_array, is_record, leaves, n_result_words

OBJECT_TYPE, ARRAY_DATA, ARRAY_DIMENSIONS, ARRAY_LENGTHS, ARRAY_DTYPE, ARRAY_FLAGS, FLOAT_VALUE = 1, 2, 3, 4, 7, 8, 2
"""places, in words of 8 bytes, in PyObject, PyArrayObject and PyFloatObject"""
C_CONTIGUOUS = 1
"""NPY_ARRAY_C_CONTIGUOUS"""


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """Returns the address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _kept(context: Any, array: Any) -> Any:
    """Returns the memory of an array, which is to be released in the end; 0 if it lies in an argument."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        context.nrt.incref(builder, signature.args[0], arguments[0])
        return builder.ptrtoint(
            context.make_array(signature.args[0])(context, builder, arguments[0]).meminfo, ir.IntType(64)
        )

    return types.int64(array), generate


def shim_of(
    name: str, function: Callable[..., Any], arguments: Sequence[Layout], result: Layout
) -> Callable[[int], int]:
    """Returns the shim of a function that numba compiled: a Python function `name`, which numba compiles too.

    One name is for one shim: the engine that loads object code finds a function by its name alone.
    """
    names: dict[str, Any] = {
        "f": function,
        "carray": carray,
        "pointer": _pointer,
        "kept": _kept,
        "i64": np.int64,
        "f64": np.float64,
    }
    words = list(leaves(arguments))
    lines = [f"w = carray(pointer(address), {len(words) + n_result_words(result) + 1}, i64)", "kinds = w[0]"]
    for place, leaf in enumerate(words, 1):
        lines += _argument(place, leaf, names)
    counter = iter(range(1, len(words) + 1))
    passed = [_passed(layout, counter, names) for layout in arguments]
    lines.append(f"r = f({', '.join(passed)})")
    lines += _results(result, "r", iter(range(len(words) + 1, len(words) + n_result_words(result) + 1)))
    text = f"def {name}(address):\n" + "".join(f"    {line}\n" for line in [*lines, "return 0"])
    exec(text, names)
    made: Callable[[int], int] = names[name]
    return made


def _argument(place: int, leaf: Layout, names: dict[str, Any]) -> list[str]:
    """Returns the lines that read one word into `a{place}`."""
    if leaf == "int":
        return [f"a{place} = w[{place}]"]
    if leaf == "bool":
        return [f"a{place} = w[{place}] != 0"]
    if leaf == "float":
        return [f"a{place} = carray(pointer(w[{place}] + {8 * FLOAT_VALUE}), 1, f64)[0]"]
    _, dtype, dimensions = leaf
    names[f"t{place}"] = np.dtype(dtype)
    lengths = ", ".join(f"n[{i}]" for i in range(dimensions))
    others = [
        f"o[{OBJECT_TYPE}] != k[0]",
        *([] if is_record(leaf) else [f"o[{ARRAY_DTYPE}] != k[{place}]"]),
        f"(o[{ARRAY_DIMENSIONS}] & 0xFFFFFFFF) != {dimensions}",
        f"not o[{ARRAY_FLAGS}] & {C_CONTIGUOUS}",
    ]
    return [
        f"o = carray(pointer(w[{place}]), {ARRAY_FLAGS + 1}, i64)",
        f"k = carray(pointer(kinds), {place + 1}, i64)",
        f"if {' or '.join(others)}: return {place}",
        f"n = carray(pointer(o[{ARRAY_LENGTHS}]), {max(dimensions, 1)}, i64)",
        f"a{place} = carray(pointer(o[{ARRAY_DATA}]), ({lengths},), t{place})",
    ]


def _passed(layout: Layout, places: Any, names: dict[str, Any]) -> str:
    """Returns the expression that builds an argument from the words that were read."""
    if layout is None:
        return "None"
    if isinstance(layout, list) and layout[0] == "tuple":
        members = ", ".join(_passed(member, places, names) for member in layout[2])
        kind = class_of(layout[1])
        if kind is tuple:
            return f"({members},)"
        names[kind.__name__] = kind
        return f"{kind.__name__}({members})"
    return f"a{next(places)}"


def _results(layout: Layout, value: str, places: Any) -> list[str]:
    """Returns the lines that write the words of a result."""
    if layout is None:
        return []
    if isinstance(layout, list) and layout[0] == "tuple":
        return [line for i, member in enumerate(layout[2]) for line in _results(member, f"{value}[{i}]", places)]
    if is_array(layout):
        first = f"w[{next(places)}], w[{next(places)}] = kept({value}), {value}.ctypes.data"
        return [first, *(f"w[{next(places)}] = {value}.shape[{i}]" for i in range(layout[2]))]
    if layout == "float":
        return [f"w[{next(places)}] = f64({value}).view(i64)"]
    return [f"w[{next(places)}] = i64({value})"]
