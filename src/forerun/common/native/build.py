"""Compiles functions ahead of time and writes the object code of the library.

`signatures.jsonl` lists the types that each function is called with.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import blake2b
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba

from forerun.common.native.library import FOLDER, library, machine, stamp
from forerun.common.native.shim import shim_of
from forerun.common.native.signatures import Signature, signatures

_BARE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""options of numba: without functions that Python or C could call"""


def build(folder: Path, called: Sequence[Signature], compiling: Callable[..., Any] = map) -> list[str]:
    """Writes the index and one object file for each of the signatures `called` into `folder`.

    Args:
        compiling: applies a function to a list, as `map` does; the map of a pool compiles several functions at a time.

    Returns a line for each function that stays without object code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    code, runtime = _runtime()
    (folder / "runtime.o").write_bytes(code)
    functions: dict[str, list[dict[str, Any]]] = {}
    of_these_sources = stamp()
    left_out = []
    for number, (made, (name, variant)) in enumerate(zip(compiling(_compiled, called), called, strict=True)):
        missing = sorted(made.missing - runtime)
        if missing:
            left_out.append(f"{name}: it calls {', '.join(missing)}, which this library does not have")
            continue
        file = f"{of_these_sources}-{number}.o"
        (folder / file).write_bytes(made.code)
        functions.setdefault(name, []).append({**variant, "object": file, "symbol": made.symbol})
    index = {"machine": machine(), "stamp": of_these_sources, "functions": functions}
    (folder / "index.json").write_text(json.dumps(index))
    return left_out


class _Compiled(NamedTuple):
    code: bytes
    symbol: str
    missing: set[str]
    """functions that it calls and that the C library does not have"""


def _compiled(signature: Signature) -> _Compiled:
    """Compiles a function for the types of one call."""
    name, variant = signature
    module, _, function = name.partition(":")
    shim_name = f"shim_{blake2b(repr(signature).encode(), digest_size=8).hexdigest()}"
    dispatcher = getattr(import_module(module), function).dispatcher
    shim = shim_of(shim_name, dispatcher, variant["arguments"], variant["result"])
    compiler: Any = numba.njit
    compiled = compiler("int64(int64)", **_BARE)(shim)
    (made,) = compiled.overloads.values()
    outside = {function.name for function in made.library._final_module.functions if function.is_declaration}
    return _Compiled(made.library._get_compiled_object(), made.fndesc.llvm_func_name, set(filter(_is_missing, outside)))


def _is_missing(name: str) -> bool:
    """Says whether the C library lacks a function. What needs the interpreter or numba counts as missing."""
    if name.startswith("llvm."):
        return False
    return name.startswith(("Py", "numba_", "NRT_")) or not hasattr(ctypes.CDLL(None), name)


def _runtime() -> tuple[bytes, set[str]]:
    """Returns the object code of `runtime.ll`, and the functions that it defines."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text = Template(Path(__file__).with_name("runtime.ll").read_text()).substitute(triple=llvm.get_process_triple())
    module = llvm.parse_assembly(text)
    target = llvm.Target.from_default_triple().create_target_machine(reloc="default", codemodel="jitdefault", jit=True)
    return target.emit_object(module), {function.name for function in module.functions if not function.is_declaration}


def _prepare() -> None:
    """Makes numba write code for every processor of this architecture, and no functions that Python could call."""
    settings: Any = numba
    settings.config.CPU_NAME, settings.config.CPU_FEATURES = "generic", ""
    settings.njit = partial(numba.njit, **_BARE)


def main() -> None:
    """Builds the library beside this file, unless it exists. Prints the functions that numba has to compile at run
    time.
    """
    if library() is not None:
        return
    pool = ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_prepare)
    with TemporaryDirectory(dir=FOLDER.parent) as folder, pool:
        for line in build(Path(folder), signatures(), pool.map):
            print(line, file=sys.stderr)
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(folder, FOLDER)
