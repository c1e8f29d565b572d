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
from typing import Any

import llvmlite.binding as llvm
import torch

from forerun.common.errors import ForerunError

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


_IR = """
target triple = "{triple}"
declare i8* @pthread_getspecific({key_type})
declare i32 @pthread_setspecific({key_type}, i8*)
declare void @create_cpu_generator(i8* sret(i8), i64)
declare i8* @cpu_allocator()

@next_stream = global i64 1

define i64 @word() {{
  %p = call i8* @pthread_getspecific({key_type} {key})
  %w = ptrtoint i8* %p to i64
  ret i64 %w
}}
define void @set_word(i64 %w) {{
  %p = inttoptr i64 %w to i8*
  %r = call i32 @pthread_setspecific({key_type} {key}, i8* %p)
  ret void
}}
define i64 @index() {{
  %w = call i64 @word()
  %i = and i64 %w, 255
  ret i64 %i
}}
define void @set_index(i64 %i) {{
  %w = call i64 @word()
  %stream = and i64 %w, -256
  %low = and i64 %i, 255
  %new = or i64 %stream, %low
  call void @set_word(i64 %new)
  ret void
}}
define i64 @stream() {{
  %w = call i64 @word()
  %s = lshr i64 %w, 8
  ret i64 %s
}}
define void @set_stream(i64 %s) {{
  %i = call i64 @index()
  %high = shl i64 %s, 8
  %new = or i64 %high, %i
  call void @set_word(i64 %new)
  ret void
}}
define i16 @device_of(i64 %i) {{
  %t = trunc i64 %i to i16
  %h = shl i16 %t, 8
  %d = or i16 %h, {cuda}
  ret i16 %d
}}
define i64 @index_of(i16 %d) {{
  %h = lshr i16 %d, 8
  %i = zext i16 %h to i64
  ret i64 %i
}}
define {{i64, i64}} @make_stream(i64 %id) {{
  %i = call i64 @index()
  %d = call i16 @device_of(i64 %i)
  %w = zext i16 %d to i64
  %a = insertvalue {{i64, i64}} undef, i64 %w, 0
  %b = insertvalue {{i64, i64}} %a, i64 %id, 1
  ret {{i64, i64}} %b
}}
define i64 @fresh_stream() {{
  %s = atomicrmw add i64* @next_stream, i64 1 seq_cst
  ret i64 %s
}}

define zeroext i8 @guard_type(i8* %this) {{ ret i8 {cuda} }}
define i16 @guard_exchangeDevice(i8* %this, i16 %d) {{
  %old = call i64 @index()
  %i = call i64 @index_of(i16 %d)
  call void @set_index(i64 %i)
  %r = call i16 @device_of(i64 %old)
  ret i16 %r
}}
define i16 @guard_getDevice(i8* %this) {{
  %i = call i64 @index()
  %r = call i16 @device_of(i64 %i)
  ret i16 %r
}}
define void @guard_setDevice(i8* %this, i16 %d) {{
  %i = call i64 @index_of(i16 %d)
  call void @set_index(i64 %i)
  ret void
}}
define void @guard_uncheckedSetDevice(i8* %this, i16 %d) {{
  call void @guard_setDevice(i8* %this, i16 %d)
  ret void
}}
define {{i64, i64}} @guard_getStream(i8* %this, i16 %d) {{
  %s = call i64 @stream()
  %r = call {{i64, i64}} @make_stream(i64 %s)
  ret {{i64, i64}} %r
}}
define {{i64, i64}} @guard_getDefaultStream(i8* %this, i16 %d) {{
  %r = call {{i64, i64}} @make_stream(i64 0)
  ret {{i64, i64}} %r
}}
define {{i64, i64}} @guard_getStreamFromGlobalPool(i8* %this, i16 %d, i8 %high) {{
  %s = call i64 @fresh_stream()
  %r = call {{i64, i64}} @make_stream(i64 %s)
  ret {{i64, i64}} %r
}}
define {{i64, i64}} @guard_getNewStream(i8* %this, i16 %d, i32 %priority) {{
  %s = call i64 @fresh_stream()
  %r = call {{i64, i64}} @make_stream(i64 %s)
  ret {{i64, i64}} %r
}}
define {{i64, i64}} @guard_exchangeStream(i8* %this, i64 %device, i64 %id) {{
  %old = call i64 @stream()
  call void @set_stream(i64 %id)
  %r = call {{i64, i64}} @make_stream(i64 %old)
  ret {{i64, i64}} %r
}}
define i8* @guard_getStreamNativeHandle(i8* %this, i64 %device, i64 %id) {{
  %p = inttoptr i64 %id to i8*
  ret i8* %p
}}
define void @guard_destroyEvent(i8* %this, i8* %event, i8 %index) {{ ret void }}
define i64 @stream_at(i8* %stream) {{
  %q = bitcast i8* %stream to i64*
  %at = getelementptr i64, i64* %q, i64 1
  %id = load i64, i64* %at
  ret i64 %id
}}
define void @guard_record(i8* %this, i8** %event, i8* %stream, i8 %index, i32 %flag) {{
  %id = call i64 @stream_at(i8* %stream)
  %f = inttoptr i64 {on_record} to i64 (i64)*
  %e = call i64 %f(i64 %id)
  %p = inttoptr i64 %e to i8*
  store i8* %p, i8** %event
  ret void
}}
define void @guard_block(i8* %this, i8* %event, i8* %stream) {{
  %id = call i64 @stream_at(i8* %stream)
  %e = ptrtoint i8* %event to i64
  %f = inttoptr i64 {on_block} to i64 (i64, i64)*
  %r = call i64 %f(i64 %e, i64 %id)
  ret void
}}
define zeroext i8 @guard_queryEvent(i8* %this, i8* %event) {{ ret i8 1 }}
define zeroext i8 @guard_queryStream(i8* %this, i8* %stream) {{ ret i8 1 }}
define zeroext i8 @guard_isStreamCapturing(i8* %this, i8* %stream) {{ ret i8 0 }}
define signext i8 @guard_deviceCount(i8* %this) {{ ret i8 {count} }}
define void @guard_synchronizeStream(i8* %this, i8* %stream) {{
  call void @sync()
  ret void
}}
define void @guard_synchronizeEvent(i8* %this, i8* %event) {{
  call void @sync()
  ret void
}}
define void @guard_synchronizeDevice(i8* %this, i8 %index) {{
  call void @sync()
  ret void
}}
define void @sync() {{
  %f = inttoptr i64 {on_sync} to i64 ()*
  %r = call i64 %f()
  ret void
}}
define void @guard_recordDataPtrOnStream(i8* %this, i8* %data, i8* %stream) {{ ret void }}

define zeroext i8 @hooks_hasCUDA(i8* %this) {{ ret i8 1 }}
define zeroext i8 @hooks_isBuilt(i8* %this) {{ ret i8 1 }}
define zeroext i8 @hooks_isAvailable(i8* %this) {{ ret i8 1 }}
define zeroext i8 @hooks_hasPrimaryContext(i8* %this, i8 %index) {{ ret i8 1 }}
define zeroext i8 @hooks_isPinnedPtr(i8* %this, i8* %data) {{ ret i8 1 }}
define void @hooks_init(i8* %this) {{ ret void }}
define void @hooks_deviceSynchronize(i8* %this, i8 %index) {{
  call void @sync()
  ret void
}}
define i32 @hooks_getNumGPUs(i8* %this) {{ ret i32 {count} }}
define signext i8 @hooks_deviceCount(i8* %this) {{ ret i8 {count} }}
define signext i8 @hooks_current_device(i8* %this) {{
  %i = call i64 @index()
  %r = trunc i64 %i to i8
  ret i8 %r
}}
define signext i8 @hooks_getCurrentDevice(i8* %this) {{
  %r = call i8 @hooks_current_device(i8* %this)
  ret i8 %r
}}
define void @hooks_setCurrentDevice(i8* %this, i8 %index) {{
  %i = zext i8 %index to i64
  call void @set_index(i64 %i)
  ret void
}}
define signext i8 @hooks_exchangeDevice(i8* %this, i8 %index) {{
  %old = call i8 @hooks_current_device(i8* %this)
  call void @hooks_setCurrentDevice(i8* %this, i8 %index)
  ret i8 %old
}}
define signext i8 @hooks_maybeExchangeDevice(i8* %this, i8 %index) {{
  %old = call i8 @hooks_exchangeDevice(i8* %this, i8 %index)
  ret i8 %old
}}
define i8* @hooks_getPinnedMemoryAllocator(i8* %this) {{
  %a = call i8* @cpu_allocator()
  ret i8* %a
}}
define void @hooks_getNewGenerator(i8* sret(i8) %out, i8* %this, i8 %index) {{
  call void @create_cpu_generator(i8* sret(i8) %out, i64 67280421310721)
  ret void
}}
"""


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
        seed = "y" if darwin else "m"  # how uint64_t is mangled
        llvm.add_symbol("create_cpu_generator", self._address(self._cpu, f"_ZN2at6detail18createCPUGeneratorE{seed}"))
        llvm.add_symbol("cpu_allocator", self._address(self._c10, "_ZN3c1015GetCPUAllocatorEv"))
        for name in ("pthread_getspecific", "pthread_setspecific"):
            llvm.add_symbol(name, self._address(ctypes.CDLL(None), name))
        text = _IR.format(
            triple=llvm.get_process_triple(),
            key_type="i64" if darwin else "i32",
            key=key.value,
            cuda=CUDA,
            count=n_devices,
            on_record=address[0],
            on_block=address[1],
            on_sync=address[2],
        )
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
        defined = set(re.findall(r"define [^@]*@(\w+)\(", _IR))
        for slot, name in enumerate(names):
            if f"{prefix}_{name}" in defined:
                table[slot] = self._jit.get_function_address(f"{prefix}_{name}")
        return table
