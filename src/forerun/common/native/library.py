"""The object code that came with the package, and calls into it.

`build` writes a folder of object files and an index. The index has a stamp of the compiled sources. If a source has
changed since, or if the machine or the layout of Python's objects differs, the library is not used, and numba compiles
every function at its first call.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import sys
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite.binding as llvm
import numpy as np

try:
    from numpy._core import _multiarray_umath as _multiarray  # type: ignore[attr-defined]
except ImportError:  # numpy 1
    from numpy.core import _multiarray_umath as _multiarray

from forerun.common.native.layout import Layout, class_of, is_array, is_record, leaves, n_result_words

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "objects"
COMPILED_FOLDERS = (
    *("answers/analysis", "answers/jobs", "answers/profile", "answers/search"),
    *("astrasim/astra", "astrasim/chakra", "astrasim/messages", "common", "common/native"),
    *("core/engine", "core/memory", "core/network/topology", "core/program", "sources/profile", "sources/trace"),
)
"""packages with compiled functions, or with constants that are compiled into them"""

_NUMPY_API = {"PyArray_NewCopy": 85, "PyArray_NewFromDescr": 94, "PyArray_SetBaseObject": 282}
"""places of functions in numpy's table, which its ABI guarantees"""

_SOURCES = {".py", ".yaml", ".jsonl", ".ll"}


class Mismatch(Exception):
    """The arguments are not those that a native function was compiled for."""


def machine() -> str:
    """Names the machine and the interpreter that object code is for."""
    threads = "-free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    return f"{platform.system()}-{platform.machine()}-{8 * ctypes.sizeof(ctypes.c_void_p)}{threads}".lower()


def stamp(root: Path = ROOT) -> str:
    """Returns a digest of the sources that compiled functions are made of."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in COMPILED_FOLDERS:
        for path in sorted(path for path in (root / folder).iterdir() if path.suffix in _SOURCES):
            digest.update(f"{folder}/{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def library() -> Library | None:
    """Returns the library that came with the package; None if it has none that fits."""
    try:
        index = json.loads((FOLDER / "index.json").read_bytes())
    except (OSError, ValueError):
        return None
    if index["machine"] != machine() or index["stamp"] != stamp() or not _layout_is_known():
        return None
    return Library(FOLDER, index)


def _layout_is_known() -> bool:
    """Says whether this interpreter and this numpy lay their objects out as the shims read them."""
    if sys.implementation.name != "cpython":
        return False
    some, number = np.zeros((2, 3), np.int16), 1.5
    words = (ctypes.c_int64 * 9).from_address(id(some))
    lengths = (ctypes.c_int64 * 2).from_address(words[4])
    return (
        words[1] == id(np.ndarray)
        and words[2] == some.ctypes.data
        and words[3] & 0xFFFFFFFF == some.ndim
        and tuple(lengths) == some.shape
        and words[7] == id(some.dtype)
        and words[8] & 0xFFFFFFFF == some.flags.num
        and ctypes.c_double.from_address(id(number) + 16).value == number
    )


class Library:
    """Object code of compiled functions, loaded one by one as they are called."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self._folder = folder
        self._functions: dict[str, list[dict[str, Any]]] = index["functions"]
        self._engine: Any = None
        self._loaded: set[str] = set()
        self._loading = Lock()

    def variants(self, name: str) -> Iterator[Callable[..., Any]]:
        """Yields the functions of this `module:name`, one for each set of argument types.

        It yields none where another process has replaced the object files since the index was read.
        """
        for variant in self._functions.get(name, []):
            with suppress(OSError):
                yield _caller(self, variant)

    def address(self, name: str, symbol: str) -> int:
        """Returns the address of a symbol of an object file, which it loads at first.

        One thread loads at a time. LLVM's engine gives the address of a function that another thread has added and not
        yet made executable, and a call to it ends the process.
        """
        with self._loading:
            if self._engine is None:
                self._engine = _engine()
                self._add("runtime.o")
            if name not in self._loaded:
                self._add(name)
            found: int = self._engine.get_function_address(symbol)
            return found

    def _add(self, name: str) -> None:
        self._engine.add_object_file(llvm.ObjectFileRef.from_data((self._folder / name).read_bytes()))
        self._engine.finalize_object()
        self._loaded.add(name)

    @cached_property
    def call(self) -> Callable[[int, int], tuple[Any, ...] | None]:
        """Returns `forerun_call` of `runtime.ll`, which calls a shim and makes the arrays of its result."""
        prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64, ctypes.c_int64)
        return prototype(self.address("runtime.o", "forerun_call"))


def _engine() -> Any:
    """Returns an engine without code, which object files are added to."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, address in _addresses():
        llvm.add_symbol(name, address)
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)


def _addresses() -> Iterator[tuple[str, int]]:
    """Yields the functions of Python and numpy that `runtime.ll` calls."""
    pythonapi = ctypes.pythonapi
    for name in ("Py_IncRef", "Py_DecRef", "PyTuple_New", "PyTuple_SetItem", "PyCapsule_New", "PyCapsule_GetPointer"):
        yield name, _address(pythonapi[name])
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        _address(pythonapi["PyCapsule_GetPointer"])
    )
    table = ctypes.cast(pointer_of(_multiarray._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    for name, place in _NUMPY_API.items():
        yield name, table[place] or 0


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _caller(library: Library, variant: dict[str, Any]) -> Callable[..., Any]:
    """Returns a Python function that passes its arguments on to a native function.

    It raises Mismatch if an argument has another type or if the native function raises an exception; numba's function
    then raises the same exception. It raises TypeError if an int is not a number, and OverflowError if an int has more
    than 64 bits.
    """
    arguments, result = variant["arguments"], variant["result"]
    words = list(leaves(arguments))
    first = 1 + len(words)
    dtypes = [np.dtype(leaf[1]) if is_array(leaf) else None for leaf in words]
    kinds = array("q", [id(np.ndarray), *(id(dtype) for dtype in dtypes)])
    spec, made_of = _spec(library.address(variant["object"], variant["symbol"]), result, first)
    names: dict[str, Any] = {"Mismatch": Mismatch, "array": array, "call": library.call}
    names |= {"float_of": _float_of, "check_record": _check_record, "float_at": _float_at}
    names |= {"keep": (library, kinds, dtypes, spec, made_of)}
    lines, values = _packed(arguments, [f"a{i}" for i in range(len(arguments))], names)
    slots = ", ".join([str(kinds.buffer_info()[0]), *values, *["0"] * n_result_words(result)])
    lines += [
        f"words = array('q', ({slots},))",
        f"made = call({spec.buffer_info()[0]}, words.buffer_info()[0])",
        "if made is None: raise Mismatch",
        f"return {_made(result, count(first), count(), names)}",
    ]
    parameters = ", ".join(f"a{i}" for i in range(len(arguments)))
    text = f"def called({parameters}):\n" + "".join(f"    {line}\n" for line in lines)
    exec(text, names)
    caller: Callable[..., Any] = names["called"]
    return caller


def _float_of(value: object) -> float:
    if not isinstance(value, (float, np.floating)):
        raise Mismatch
    return float(value)


def _check_record(value: object, known: list[np.dtype[Any]]) -> None:
    """Checks that an array has records of this dtype, and keeps their dtype, which is compared faster the next time."""
    if not isinstance(value, np.ndarray):
        raise Mismatch
    dtype = value.dtype
    if dtype is not known[0]:
        if dtype != known[0]:
            raise Mismatch
        known[0] = dtype


def _packed(layouts: Sequence[Layout], values: Sequence[str], names: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the lines that check the classes of `values`, and the expressions of their words."""
    lines, words = [], []
    for layout, value in zip(layouts, values, strict=True):
        if layout is None:
            lines.append(f"if {value} is not None: raise Mismatch")
        elif isinstance(layout, list) and layout[0] == "tuple":
            kind = f"K{len(names)}"
            names[kind] = class_of(layout[1])
            lines.append(f"if {value}.__class__ is not {kind} or len({value}) != {len(layout[2])}: raise Mismatch")
            inner = [f"{value}_{i}" for i in range(len(layout[2]))]
            lines.append(f"{', '.join(inner)}, = {value}")
            more = _packed(layout[2], inner, names)
            lines += more[0]
            words += more[1]
        elif is_array(layout):
            if is_record(layout):
                known = f"known{len(names)}"
                names[known] = [np.dtype(layout[1])]
                lines.append(f"check_record({value}, {known})")
            words.append(f"id({value})")
        elif layout == "float":
            lines.append(f"{value} = float_of({value})")
            words.append(f"id({value})")
        else:
            words.append(value)
    return lines, words


def _spec(shim: int, result: Layout, first: int) -> tuple[array[int], list[np.dtype[Any]]]:
    """Returns the description of a result for `forerun_call`, whose words begin at `first`, and the dtypes that it
    points to.
    """
    arrays, dtypes, place = array("q"), [], first
    for leaf in leaves([result]):
        if is_array(leaf):
            dtypes.append(np.dtype(leaf[1]))
            arrays.extend((place, id(dtypes[-1]), leaf[2]))
        place += n_result_words(leaf)
    return array("q", (shim, id(None), id(np.ndarray), len(dtypes))) + arrays, dtypes


def _made(layout: Layout, at: Iterator[int], arrays: Iterator[int], names: dict[str, Any]) -> str:
    """Returns the expression of a result, which reads the words number `at` and the array number `arrays` in `made`.

    It adds the objects that the expression uses to `names`.
    """
    if layout is None:
        return "None"
    if isinstance(layout, list) and layout[0] == "tuple":
        members = "".join(f"{_made(member, at, arrays, names)}, " for member in layout[2])
        kind = f"K{len(names)}"
        names[kind] = class_of(layout[1])
        return f"({members})" if names[kind] is tuple else f"{kind}({members})"
    place = next(at)
    if is_array(layout):
        for _ in range(1 + layout[2]):
            next(at)
        return f"made[{next(arrays)}]"
    word = f"words[{place}]"
    if layout == "float":
        return f"float_at({word})"
    return f"bool({word})" if layout == "bool" else word


def _float_at(word: int) -> float:
    """Returns the float that has the bits of `word`."""
    return float(np.int64(word).view(np.float64))
