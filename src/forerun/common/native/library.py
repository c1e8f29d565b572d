"""The object code that came with the package, and calls into it.

`build` writes a folder of object files and an index. The index holds a stamp of the sources that were compiled: where a
source has changed since, or the machine or the layout of Python's objects is another one, there is no library, and
numba compiles every function when it is first called.
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
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from forerun.common.native.layout import Layout, class_of, is_array, is_record, leaves, n_result_words

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "objects"
COMPILED_FOLDERS = (
    *("answers/analysis", "answers/profile", "answers/search", "astrasim/chakra", "astrasim/messages", "common/native"),
    *("core/engine", "core/memory", "core/network/topology", "core/program", "sources/profile", "sources/trace"),
)
"""packages with compiled functions, or with constants that are compiled into them"""


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
    """Returns the library that came with the package; None where it has none that fits."""
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

    @property
    def release(self) -> Callable[[int], None]:
        """Returns the function that gives memory back which a native function allocated."""
        return _release(self)


def _engine() -> Any:
    """Returns an engine without code, which object files are added to."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)


@cache
def _release(library: Library) -> Callable[[int], None]:
    function: Callable[[int], None] = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(
        library.address("runtime.o", "forerun_release")
    )
    return function


def _caller(library: Library, variant: dict[str, Any]) -> Callable[..., Any]:
    """Returns a Python function that passes its arguments on to a native function.

    It raises Mismatch where they are of other types or the native function raises an exception, which numba's function
    raises too, TypeError where an int is none, and OverflowError where an int has more than 64 bits.
    """
    arguments, result = variant["arguments"], variant["result"]
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    entry = prototype(library.address(variant["object"], variant["symbol"]))
    words = list(leaves(arguments))
    dtypes = [np.dtype(leaf[1]) if is_array(leaf) else None for leaf in words]
    kinds = array("q", [id(np.ndarray), *(id(dtype) for dtype in dtypes)])
    n_results = n_result_words(result)
    names: dict[str, Any] = {"Mismatch": Mismatch, "array": array, "entry": entry, "keep": (kinds, dtypes)}
    names |= {"float_of": _float_of, "check_record": _check_record}
    names |= {"adopted": partial(_adopted, library), "float_at": _float_at}
    lines, values = _packed(arguments, [f"a{i}" for i in range(len(arguments))], names)
    slots = ", ".join([str(kinds.buffer_info()[0]), *values, *["0"] * (n_results + 2)])
    last = 8 * (len(words) + n_results + 2)
    lines += [
        f"words = array('q', ({slots},))",
        "at = words.buffer_info()[0]",
        f"if entry(at + {last}, at + {last - 8}, at) or words[-1]: raise Mismatch",
        f"return {_made(result, iter(range(1 + len(words), 1 + len(words) + n_results)), names)}",
    ]
    text = f"def call({', '.join(f'a{i}' for i in range(len(arguments)))}):\n" + "".join(f"    {at}\n" for at in lines)
    exec(text, names)
    made: Callable[..., Any] = names["call"]
    return made


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


def _made(layout: Layout, at: Iterator[int], names: dict[str, Any]) -> str:
    """Returns the expression that makes a result of the words number `at`, and adds what it uses to `names`."""
    if layout is None:
        return "None"
    if isinstance(layout, list) and layout[0] == "tuple":
        members = "".join(f"{_made(member, at, names)}, " for member in layout[2])
        kind = f"K{len(names)}"
        names[kind] = class_of(layout[1])
        return f"({members})" if names[kind] is tuple else f"{kind}({members})"
    word = f"words[{next(at)}]"
    if is_array(layout):
        address, shape = f"words[{next(at)}]", "".join(f"words[{next(at)}], " for _ in range(layout[2]))
        return f"adopted({word}, {address}, ({shape}), {layout[1]!r})"
    if layout == "float":
        return f"float_at({word})"
    return f"bool({word})" if layout == "bool" else word


def _float_at(word: int) -> float:
    """Returns the float that has the bits of `word`."""
    return float(np.int64(word).view(np.float64))


class _Memory:
    """Memory of a native function, in the hands of a numpy array."""

    def __init__(self, library: Library, memory: int, interface: dict[str, Any]) -> None:
        self._release, self._memory, self.__array_interface__ = library.release, memory, interface

    def __del__(self) -> None:
        self._release(self._memory)


def _adopted(library: Library, memory: int, address: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Returns the array of a result. It copies an array that lies in an argument."""
    interface = {"version": 3, "shape": shape, "typestr": dtype, "data": (address, False)}
    if memory:
        return np.asarray(_Memory(library, memory, interface))
    return np.array(_Borrowed(interface))


class _Borrowed:
    """Memory of an argument, which numpy copies."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface
