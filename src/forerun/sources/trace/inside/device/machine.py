"""A CUDA device for a torch that has none: its device guard and its hooks, compiled at run time.

torch's autograd engine, its streams and `torch.accelerator` ask two C++ objects about the device: the
`DeviceGuardImplInterface` of the device type and the `CUDAHooksInterface` of the process. Both are tables of function
pointers. LLVM (llvmlite comes with numba) compiles the functions in `virtual_device.ll`, which keep the current device
and stream of a thread in thread-specific data, and this module fills the tables with them. It needs no compiler and
nothing of CUDA: kernels never run, and tensors on the device are fake.

A table is ordered as the header that torch ships declares the virtual functions (Itanium C++ ABI: Linux and macOS), so
the order is read from that header.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import llvmlite.binding as llvm
import torch

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.data_files import read_text

CUDA = 1
"""The value of c10::DeviceType::CUDA."""
_VIRTUAL = re.compile(r"virtual\s+([^;{]*?)\(", re.S)
_NEEDED_HOOKS = ("hasCUDA", "getNumGPUs", "isAvailable", "deviceCount", "getNewGenerator")
_NEEDED_GUARD = ("type", "exchangeDevice", "getStream", "exchangeStream", "record", "block", "deviceCount")


def virtual_functions(header: Path, struct: str) -> list[str]:
    """Returns the names of the virtual functions that `struct` declares, in order; a destructor counts twice.

    Raises:
        ForerunError: the header is missing or declares no such struct.
    """
    try:
        text = header.read_text(encoding="utf-8")
    except OSError as error:
        raise ForerunError(f"{header}: can't be read ({error.strerror}); tracing needs torch's own headers") from error
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    found = re.search(rf"struct\s+(?:\w+\s+)?{struct}\b[^;{{]*\{{", text)
    if not found:
        raise ForerunError(f"{header}: declares no struct {struct}")
    names: list[str] = []
    for match in _VIRTUAL.finditer(text[found.end() :]):
        name = match.group(1).split()[-1].lstrip("*&")
        names += [name, name] if name.startswith("~") else [name]
    return names


class VirtualCuda:
    """The device as C++ sees it once installed; it exists as long as the process.

    `on_record(stream) -> event`, `on_block(event, stream)` and `on_sync()` are called for events that C++ itself makes.
    """

    def __init__(
        self,
        n_devices: int,
        on_record: Callable[[int], int],
        on_block: Callable[[int, int], int],
        on_sync: Callable[[], int],
    ) -> None:
        self._callbacks = (
            ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(on_record),
            ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(on_block),
            ctypes.CFUNCTYPE(ctypes.c_int64)(on_sync),
        )
        libraries = Path(torch.__file__).parent / "lib"
        suffix = "dylib" if platform.system() == "Darwin" else "so"
        try:
            self._c10 = ctypes.CDLL(str(libraries / f"libc10.{suffix}"))
            self._cpu = ctypes.CDLL(str(libraries / f"libtorch_cpu.{suffix}"))
        except OSError as error:
            raise ForerunError(f"torch's libraries can't be reached under {libraries}: {error}") from error
        self._jit = self._compile(n_devices)
        self.stream = self._function("stream", ctypes.c_int64)
        """Returns the current stream of this thread."""
        self.set_stream = self._function("set_stream", None, ctypes.c_int64)
        self.index = self._function("index", ctypes.c_int64)
        """Returns the current device of this thread."""
        self.set_index = self._function("set_index", None, ctypes.c_int64)
        self.fresh_stream = self._function("fresh_stream", ctypes.c_int64)

    def _compile(self, n_devices: int) -> Any:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        darwin = platform.system() == "Darwin"
        key = (ctypes.c_ulong if darwin else ctypes.c_uint)()
        if ctypes.CDLL(None).pthread_key_create(ctypes.byref(key), None):
            raise ForerunError("no thread-specific data left in this process")
        address = [ctypes.cast(callback, ctypes.c_void_p).value for callback in self._callbacks]
        seed = "y" if darwin else "m"  # The mangled name of uint64_t.
        llvm.add_symbol("create_cpu_generator", self._address(self._cpu, f"_ZN2at6detail18createCPUGeneratorE{seed}"))
        llvm.add_symbol("cpu_allocator", self._address(self._c10, "_ZN3c1015GetCPUAllocatorEv"))
        for name in ("pthread_getspecific", "pthread_setspecific"):
            llvm.add_symbol(name, self._address(ctypes.CDLL(None), name))
        text = Template(read_text("device/virtual_device.ll")).substitute(
            triple=llvm.get_process_triple(),
            key_type="i64" if darwin else "i32",
            key=key.value,
            cuda=CUDA,
            count=n_devices,
            on_record=address[0],
            on_block=address[1],
            on_sync=address[2],
        )
        self._defined = set(re.findall(r"define [^@]*@(\w+)\(", text))
        module = llvm.parse_assembly(text)
        module.verify()
        engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
        engine.finalize_object()
        return engine

    @staticmethod
    def _address(library: ctypes.CDLL, symbol: str) -> int:
        try:
            found = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
        except AttributeError as error:
            raise ForerunError(f"torch {torch.__version__} lacks {symbol}: this build can't be traced") from error
        assert found is not None
        return found

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(self._jit.get_function_address(name))

    def install(self) -> None:
        """Installs the device guard and the hooks.

        Raises:
            ForerunError: torch's headers don't declare the functions that are needed.
        """
        include = Path(torch.__file__).parent / "include"
        guard = virtual_functions(include / "c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")
        base = virtual_functions(include / "ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface")
        own = virtual_functions(include / "ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface")
        hooks = base + [name for name in own if name not in base]
        for needed, names in ((_NEEDED_GUARD, guard), (_NEEDED_HOOKS, hooks)):
            missing = set(needed) - set(names)
            if missing:
                raise ForerunError(f"torch {torch.__version__}: its headers don't declare {', '.join(sorted(missing))}")
        registry = ctypes.addressof(ctypes.c_char.in_dll(self._c10, "_ZN3c104impl26device_guard_impl_registryE"))
        slots = ctypes.cast(registry, ctypes.POINTER(ctypes.c_void_p))
        self._guard_table = self._table(self._table_of(slots[0]), guard, "guard")
        self._guard = ctypes.c_void_p(ctypes.addressof(self._guard_table))
        slots[CUDA] = ctypes.addressof(self._guard)
        get_hooks = self._cpu._ZN2at6detail12getCUDAHooksEv
        get_hooks.restype = ctypes.c_void_p
        instance = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
        self._hooks_table = self._table(int(instance[0] or 0), hooks, "hooks")
        instance[0] = ctypes.addressof(self._hooks_table)

    @staticmethod
    def _table_of(instance: int | None) -> int:
        if not instance:
            raise ForerunError("torch has no device guard for the CPU")
        return int(ctypes.cast(instance, ctypes.POINTER(ctypes.c_void_p))[0] or 0)

    def _table(self, original: int, names: list[str], prefix: str) -> Any:
        """Returns a copy of the table at `original` with our functions in the slots that we have one for."""
        table = (ctypes.c_void_p * len(names))()
        ctypes.memmove(table, original, ctypes.sizeof(table))
        for slot, name in enumerate(names):
            if f"{prefix}_{name}" in self._defined:
                table[slot] = self._jit.get_function_address(f"{prefix}_{name}")
        return table
