"""Compiles functions ahead of time: `python -m forerun.common.native.build` writes the object code of the library.

`signatures.json` lists the types that each function is called with.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Any

from forerun.common.native.library import FOLDER, library, machine, stamp
from forerun.common.native.signatures import SIGNATURES

_PROCESSOR = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_DISABLE_JIT": "0"}
"""what every processor of an architecture runs"""


def build(folder: Path, signatures: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Writes the index and one object file for each of `signatures` (see signatures.json) into `folder`.

    Returns a line for each function that stays without object code.
    """
    os.environ.update(_PROCESSOR)
    import llvmlite.binding as llvm
    import numba

    from forerun.common.native.shim import shim_of

    folder.mkdir(parents=True, exist_ok=True)
    code, runtime = _runtime(llvm)
    (folder / "runtime.o").write_bytes(code)
    functions: dict[str, list[dict[str, Any]]] = {}
    left_out = []
    for name, variants in signatures.items():
        module, _, function = name.partition(":")
        compiled = getattr(import_module(module), function).dispatcher
        for variant in variants:
            shim = numba.njit("int64(int64)", no_cpython_wrapper=True, no_cfunc_wrapper=True)(
                shim_of(compiled, variant["arguments"], variant["result"])
            )
            (made,) = shim.overloads.values()
            missing = _missing(made.library._final_module, runtime)
            if missing:
                left_out.append(f"{name}: it calls {', '.join(missing)}, which this library does not have")
                continue
            file = f"{sum(map(len, functions.values()))}.o"
            (folder / file).write_bytes(made.library._get_compiled_object())
            functions.setdefault(name, []).append({**variant, "object": file, "symbol": made.fndesc.llvm_func_name})
    index = {"machine": machine(), "stamp": stamp(), "functions": functions}
    (folder / "index.json").write_text(json.dumps(index))
    return left_out


def _runtime(llvm: Any) -> tuple[bytes, set[str]]:
    """The object code of `runtime.ll`, and the functions that it defines."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text = Template(Path(__file__).with_name("runtime.ll").read_text()).substitute(triple=llvm.get_process_triple())
    module = llvm.parse_assembly(text)
    target = llvm.Target.from_default_triple().create_target_machine(reloc="default", codemodel="jitdefault", jit=True)
    return target.emit_object(module), {function.name for function in module.functions}


def _missing(module: Any, runtime: set[str]) -> list[str]:
    """The functions that a module calls and that neither the library's runtime nor the C library has."""
    process = ctypes.CDLL(None)
    called = {function.name for function in module.functions if function.is_declaration} - runtime
    return sorted(
        name
        for name in called
        if not name.startswith("llvm.") and (name.startswith(("Py", "numba_", "NRT_")) or not hasattr(process, name))
    )


def main() -> None:
    """Builds the library beside this file, unless it is there; prints what stays for numba to compile."""
    if library() is not None:
        return
    with TemporaryDirectory(dir=FOLDER.parent) as folder:
        for line in build(Path(folder), json.loads(SIGNATURES.read_bytes())):
            print(line, file=sys.stderr)
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(folder, FOLDER)


if __name__ == "__main__":
    main()
