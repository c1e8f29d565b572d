"""`torch.cuda` on a virtual device: the Python functions that a build without CUDA (or without a driver) lacks.

Most of `torch.cuda` is Python that calls `torch._C._cuda_*`. This module defines those functions, so that torch's own
Python runs unchanged; the functions that `cuda_functions.yaml` lists as unavailable raise an error with their name.
Four things are replaced at a higher level: stream and event classes (torch's, rebuilt on base classes of ours), CUDA
graphs (a capture keeps the kernels, a replay issues them), `make_graphed_callables` (the callables run eagerly) and
torch's queries of NVML.

Known differences: `Event.elapsed_time` is 1 ms; reserved memory is allocated memory rounded up to 2 MiB; cuDNN says
that it is available, but recurrent layers don't use it; all devices of a process share one current stream.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.device.cuda_streams import capturing, graph_class, pool_handle, stream_classes
from forerun.sources.trace.inside.device.generator import DeviceGenerator
from forerun.sources.trace.inside.device.machine import CUDA, VirtualCuda
from forerun.sources.trace.inside.device.virtual_device import VirtualDevice, torch_build
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.unseen import rebind

_SEGMENT_BYTES = 2 << 20
"""The caching allocator requests multiples of this from the driver."""
_BLAS_WORKSPACE_BYTES = 32 << 20
_BUILT_WITH = torch._C._show_config()
"""What `torch.__config__.show()` says; a build for the CPU can't say it once there is a device."""


def built_for_cuda() -> bool:
    """Returns whether this torch contains CUDA's libraries, which need a driver wherever they are called."""
    return any((Path(torch.__file__).parent / "lib").glob("*torch_cuda.*"))


def install(machine: VirtualCuda, recorder: Recorder, device: VirtualDevice) -> None:
    """Fills `torch.cuda` and everything that belongs to it. `machine` must be installed before."""
    count = int(torch._C._accelerator_hooks_device_count())
    core: Any = torch._C
    names = _device_functions(machine, recorder, count) | _stream_functions(machine, recorder)
    names |= _memory_functions(recorder, device) | _settings() | _accelerator_functions(recorder, device)
    alike = read_data("device/cuda_functions.yaml")
    names |= dict.fromkeys(alike["nothing"], _nothing) | {name: _unavailable(name) for name in alike["unavailable"]}
    for name, value in names.items():
        setattr(core, name, value)
    core._has_cuda = True
    core._CudaStreamBase, core._CudaEventBase = stream_classes(machine, recorder)
    core._CUDAGraph = graph_class(recorder)
    cuda: Any = torch.cuda
    for name, value in _cuda_attributes(recorder, device, count).items():
        setattr(cuda, name, value)
    cuda._is_in_bad_fork = lambda: False  # A forked process keeps the whole virtual device.
    if built_for_cuda():  # Its cuDNN would ask the driver which convolutions there are.
        core._set_cudnn_enabled(False)
    _make_again(cuda)
    _elsewhere()


def _device_functions(machine: VirtualCuda, recorder: Recorder, count: int) -> dict[str, Any]:
    def exchange(index: int) -> int:
        before = int(machine.index())
        if index >= 0:
            machine.set_index(index)
        return before if index >= 0 else -1

    def set_device(index: int) -> None:
        if index >= count:
            raise torch.AcceleratorError(
                f"CUDA error: invalid device ordinal {index}: the traced node has {count} GPUs (--gpus-per-node)"
            )
        machine.set_index(index)

    major, minor, patch = torch_build().nccl
    return {
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_getDevice": lambda: int(machine.index()),
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": lambda index: exchange(index),
        "_cuda_hasPrimaryContext": lambda _index: True,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
        "_cuda_getArchFlags": lambda: "sm_80 sm_86 sm_90 sm_100 sm_120",
        "_cuda_getCompiledVersion": lambda: torch_build().cuda_number,
        "_show_config": _built_with,
        "_cuda_synchronize": lambda: recorder.host_waits(),
        "_nccl_version": lambda: major << 32 | minor << 16 | patch,
        "_nccl_version_suffix": lambda: b"",
    }


def _built_with() -> str:
    return _BUILT_WITH if built_for_cuda() else f"{_BUILT_WITH}  - CUDA Runtime {torch.version.cuda}\n"


def _stream_functions(machine: VirtualCuda, recorder: Recorder) -> dict[str, Any]:
    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        if device_index != machine.index():
            machine.set_index(device_index)
        machine.set_stream(stream_id)

    return {
        "_cuda_getCurrentStream": lambda index: (machine.stream(), index, CUDA),
        "_cuda_getDefaultStream": lambda index: (0, index, CUDA),
        "_cuda_getCurrentRawStream": lambda _index: machine.stream(),
        "_cuda_setStream": set_stream,
        "_cuda_getStreamFromExternal": lambda pointer, index: (pointer, index, CUDA),
        "_cuda_getCurrentBlasHandle": lambda: 0,
        "_cuda_getCurrentSolverHandle": lambda: 0,
        "_cuda_isCurrentStreamCapturing": capturing,
        "_graph_pool_handle": pool_handle,
    }


def _memory_functions(recorder: Recorder, device: VirtualDevice) -> dict[str, Any]:
    def stats(_index: int = 0) -> dict[str, Any]:
        now, peak = recorder.memory.allocated_bytes, recorder.memory.peak_bytes
        amount = {"current": now, "peak": peak, "allocated": peak, "freed": peak - now}
        segments = {k: -(-v // _SEGMENT_BYTES) * _SEGMENT_BYTES for k, v in amount.items()}
        zero = dict.fromkeys(amount, 0)

        def pools(value: dict[str, int]) -> dict[str, dict[str, int]]:
            return {"all": value, "large_pool": value, "small_pool": zero}

        known = {"allocated_bytes": amount, "active_bytes": amount, "requested_bytes": amount}
        known["reserved_bytes"] = segments
        every = ("allocation", "segment", "active", "inactive_split", "inactive_split_bytes", *known)
        plain = {"num_alloc_retries": 0, "num_ooms": 0, "num_sync_all_streams": 0, "num_device_alloc": 0}
        return {
            **plain,
            "num_device_free": 0,
            "max_split_size": -1,
            **{name: pools(known.get(name, zero)) for name in every},
            "oversize_allocations": zero,
            "oversize_segments": zero,
        }

    def reset_peak(*_: Any) -> None:
        recorder.memory.peak_bytes = recorder.memory.allocated_bytes

    return {
        "_cuda_memoryStats": stats,
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_getMemoryFraction": lambda _index: 1.0,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": [], "allocator_settings": {}},
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_getMemoryMetadata": lambda: "",
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
        "_cudart": _runtime(recorder, device),
    }


def _runtime(recorder: Recorder, device: VirtualDevice) -> SimpleNamespace:
    """Returns the functions of the CUDA runtime that torch binds."""

    def memory(_index: int = 0) -> tuple[int, int]:
        return max(0, device.total_memory - recorder.memory.allocated_bytes), device.total_memory

    return SimpleNamespace(
        cudaMemGetInfo=memory,
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=str,
        **dict.fromkeys(("cudaProfilerStart", "cudaProfilerStop", "cudaDeviceSynchronize"), _success),
        **dict.fromkeys(("cudaHostRegister", "cudaHostUnregister"), _success),
    )


def _settings() -> dict[str, Any]:
    """Returns setters and getters of switches that programs set and read back."""
    kept = {
        "cudnn_benchmark_limit": 10,
        "sync_debug_mode": 0,
        "conv_benchmark_empty_cache": False,
    }
    names: dict[str, Any] = {"_cuda_clearCublasWorkspaces": _nothing, "_is_flash_attention_available": lambda: True}
    for name in kept:
        names[f"_cuda_get_{name}"] = lambda key=name: kept[key]
        names[f"_cuda_set_{name}"] = lambda value, key=name: kept.__setitem__(key, value)
    for library in ("Cublas", "CublasLt"):
        names[f"_cuda_get{library}WorkspaceSize"] = lambda: _BLAS_WORKSPACE_BYTES
        names[f"_cuda_set{library}WorkspaceSize"] = names[f"_cuda_reset{library}WorkspaceSize"] = _nothing
    for name in ("is_enabled", "tuning_is_enabled"):
        names[f"_cuda_tunableop_{name}"] = lambda: False
    names["_cuda_record_untuned_is_enabled"] = lambda: False
    for name in ("tunableop_enable", "tunableop_tuning_enable", "record_untuned_enable", "tunableop_set_filename"):
        names[f"_cuda_{name}"] = _nothing
    return names


def _accelerator_functions(recorder: Recorder, device: VirtualDevice) -> dict[str, Any]:
    """Returns the functions by which `torch.accelerator` asks the device's allocator."""
    memory = _memory_functions(recorder, device)
    return {
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceStats": memory["_cuda_memoryStats"],
        "_accelerator_resetPeakStats": memory["_cuda_resetPeakMemoryStats"],
        "_accelerator_getMemoryInfo": memory["_cudart"].cudaMemGetInfo,
        "_accelerator_getDeviceCapability": lambda _index: {"supported_dtypes": _DTYPES},
    }


_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2} | {
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}


def _make_graphed_callables(callables: Any, *_: Any, **__: Any) -> Any:
    """Returns the callables themselves: they run eagerly and launch the same kernels one by one."""
    return callables


def _cuda_attributes(recorder: Recorder, device: VirtualDevice, count: int) -> dict[str, Any]:
    core: Any = torch._C
    return {
        "_initialized": True,
        "_queued_calls": [],
        "_cached_device_count": count,
        "_cudart": core._cudart,
        "_CudaDeviceProperties": VirtualDevice,
        "_get_device_properties": lambda _index: device,
        "_exchange_device": core._cuda_exchangeDevice,
        "_maybe_exchange_device": core._cuda_maybeExchangeDevice,
        "default_generators": tuple(DeviceGenerator() for _ in range(count)),
        "utilization": lambda *_: 0,
        "memory_usage": lambda *_: 0,
        "temperature": lambda *_: 0,
        "power_draw": lambda *_: 0,
        "clock_rate": lambda *_: device.clock_rate // 1000,
        "device_memory_used": lambda *_: recorder.memory.allocated_bytes,
        "list_gpu_processes": lambda *_: "",
    }


def _make_again(cuda: Any) -> None:
    """Lets torch define its stream, event and graph classes again on our base classes, and replaces the old classes."""
    before: dict[int, Any] = {}
    for module, names in (
        ("torch.cuda.streams", ("Stream", "Event", "ExternalStream")),
        ("torch.cuda.graphs", ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing")),
    ):
        loaded = sys.modules[module]
        old = [getattr(loaded, name) for name in (*names, *(("make_graphed_callables",) if "graphs" in module else ()))]
        importlib.reload(loaded)
        if "graphs" in module:
            loaded.make_graphed_callables = _make_graphed_callables  # type: ignore[attr-defined]
            names = (*names, "make_graphed_callables")
        before |= {id(o): getattr(loaded, name) for o, name in zip(old, names, strict=True)}
    rebind(before)
    interface = sys.modules.get("torch._dynamo.device_interface")
    if interface is not None:
        interface.get_cuda_stream = torch._C._cuda_getCurrentRawStream  # type: ignore[attr-defined]
        interface.CudaInterface.get_raw_stream = staticmethod(torch._C._cuda_getCurrentRawStream)
        interface.CudaInterface.Stream, interface.CudaInterface.Event = cuda.Stream, cuda.Event


def _elsewhere() -> None:
    """Sets tensor methods, backends and versions that programs use on a GPU machine."""
    tensor: Any = torch.Tensor
    tensor.record_stream = _nothing
    tensor.pin_memory = _pin_memory
    tensor.is_pinned = _is_pinned
    version: Any = torch.version
    version.cuda = torch_build().cuda
    cudnn: Any = torch.backends.cudnn
    functions = cudnn.m  # The module around them has only properties.
    functions.is_available = lambda: True
    functions.is_acceptable = lambda _tensor: False
    functions.version = lambda: torch_build().cudnn
    core: Any = torch._C
    limit: Any = torch.backends.ContextProp(core._cuda_get_cudnn_benchmark_limit, core._cuda_set_cudnn_benchmark_limit)
    type(cudnn).benchmark_limit = limit  # torch gives this property only to a build that has cuDNN.
    ranges: Any = sys.modules["torch.cuda.nvtx"]
    depth = SimpleNamespace(rangePushA=_success, rangePop=_success, markA=_nothing)
    depth.rangeStartA, depth.rangeEnd = _success, _nothing
    depth.deviceRangeStart, depth.deviceRangeEnd = _nothing, _nothing
    ranges._nvtx = depth


def _pin_memory(self: Any, *_: Any, **__: Any) -> Any:
    if self.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{self.type()}': only dense CPU tensors can be pinned")
    storage = self.untyped_storage()
    key = storage._cdata
    _pinned[key] = weakref.ref(storage, lambda _: _pinned.pop(key, None))
    return self


_pinned: dict[int, Any] = {}
"""The storages that the program pinned."""


def _is_pinned(self: Any, *_: Any, **__: Any) -> bool:
    return self.device.type == "cpu" and self.untyped_storage()._cdata in _pinned


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing, for calls whose effect shows in no trace."""


def _success(*_: Any, **__: Any) -> int:
    return 0


def _unavailable(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise ForerunError(f"torch._C.{name}: can't be traced without a GPU")

    return call
