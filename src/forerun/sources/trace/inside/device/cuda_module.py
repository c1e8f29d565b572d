"""`torch.cuda` on a virtual device: what a build without CUDA (or without a driver) lacks, in Python.

Most of `torch.cuda` is Python that calls `torch._C._cuda_*`. Those functions are given here, so that torch's own Python
runs as it is; what stays is listed in `_UNAVAILABLE` and raises an error that names the function. Four things are
replaced higher up: stream and event classes (torch's, made again on base classes of ours), CUDA graphs (a capture keeps
the kernels, a replay issues them), `make_graphed_callables` (the callables run eagerly) and what NVML would be asked.

Known differences: `Event.elapsed_time` is 1 ms; reserved memory is allocated memory rounded up to 2 MiB; cuDNN says
that it is there, but recurrent layers don't use it; a device has one current stream for all its devices.
"""

from __future__ import annotations

import importlib
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.device.cuda_streams import capturing, graph_class, pool_handle, stream_classes
from forerun.sources.trace.inside.device.machine import CUDA, VirtualCuda
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.unseen import stand_in

_SEGMENT_BYTES = 2 << 20
"""the caching allocator asks the driver for multiples of this"""
_CUDA_VERSION = "12.8"
_CUDA_NUMBER = 12080
_NCCL_VERSION = (2, 27, 5)
_CUDNN_VERSION = 91002
_BLAS_WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """What programs can ask about the GPU; the fields of `torch.cuda.get_device_properties`."""

    name: str
    major: int
    minor: int
    total_memory: int
    """bytes"""
    multi_processor_count: int
    L2_cache_size: int
    """bytes"""
    shared_memory_per_multiprocessor: int = 233472
    """bytes"""
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32
    clock_rate: int = 1980000
    """kHz"""
    memory_clock_rate: int = 2619000
    """kHz"""
    memory_bus_width: int = 5120
    """bits"""
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""
    uuid: str = "00000000-0000-0000-0000-000000000000"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        return self.major, self.minor


_GIB = 1 << 30
DEVICES: Mapping[str, VirtualDevice] = {
    "a100": VirtualDevice("NVIDIA A100-SXM4-80GB", 8, 0, int(79.25 * _GIB), 108, 40 << 20, 167936, 49152, 166912),
    "h100": VirtualDevice("NVIDIA H100 80GB HBM3", 9, 0, int(79.1 * _GIB), 132, 50 << 20),
    "h200": VirtualDevice("NVIDIA H200", 9, 0, int(139.8 * _GIB), 132, 60 << 20),
    "b200": VirtualDevice("NVIDIA B200", 10, 0, int(178.3 * _GIB), 148, 126 << 20),
}
"""devices by short name; sizes are those that the driver reports"""


def device(name: str = "h100") -> VirtualDevice:
    """The device of that name.

    Raises:
        ForerunError: no such device.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        raise ForerunError(f"no device {name!r} to trace on; known: {', '.join(sorted(DEVICES))}")
    return found


class _Generator(torch.Generator):
    """A generator of the device: seed and offset (Philox), as programs save and restore them."""

    def __init__(self) -> None:
        self._seed, self._offset = 0, 0

    def manual_seed(self, seed: int) -> _Generator:
        self._seed, self._offset = int(seed) & (1 << 64) - 1, 0
        torch.Generator.manual_seed(self, self._seed)
        return self

    def seed(self) -> int:
        return self.manual_seed(time.time_ns() & (1 << 63) - 1)._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> _Generator:
        self._offset = int(offset)
        return self

    def get_state(self) -> torch.Tensor:
        """16 bytes, as CUDA's generators have."""
        data = self._seed.to_bytes(8, "little") + self._offset.to_bytes(8, "little")
        return torch.tensor(list(data), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> _Generator:
        data = bytes(state.flatten()[:16].tolist())
        self.manual_seed(int.from_bytes(data[:8], "little"))
        self._offset = int.from_bytes(data[8:], "little")
        return self

    def graphsafe_get_state(self) -> _Generator:
        return self

    def graphsafe_set_state(self, _state: Any) -> _Generator:
        return self


def built_for_cuda() -> bool:
    """Whether this torch has CUDA's libraries, which need a driver wherever they are called."""
    return any((Path(torch.__file__).parent / "lib").glob("*torch_cuda.*"))


def install(machine: VirtualCuda, recorder: Recorder, device: VirtualDevice) -> None:
    """Fill `torch.cuda` and all that goes with it. `machine` must be installed."""
    count = int(torch._C._accelerator_hooks_device_count())
    core: Any = torch._C
    names = _device_functions(machine, recorder, count) | _stream_functions(machine, recorder)
    names |= _memory_functions(recorder, device) | _settings() | _accelerator_functions(recorder, device)
    for name in _UNAVAILABLE:
        names[name] = _unavailable(name)
    for name, value in names.items():
        setattr(core, name, value)
    core._has_cuda = True
    core._CudaStreamBase, core._CudaEventBase = stream_classes(machine, recorder)
    core._CUDAGraph = graph_class(recorder)
    cuda: Any = torch.cuda
    for name, value in _cuda_attributes(recorder, device, count).items():
        setattr(cuda, name, value)
    cuda._is_in_bad_fork = lambda: False  # nothing of the device is lost in a fork
    if built_for_cuda():  # its cuDNN would ask the driver which convolutions it has
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

    return {
        "_cuda_init": _nothing,
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_getDevice": lambda: int(machine.index()),
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": lambda index: exchange(index),
        "_cuda_hasPrimaryContext": lambda _index: True,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
        "_cuda_getArchFlags": lambda: "sm_80 sm_86 sm_90 sm_100 sm_120",
        "_cuda_getCompiledVersion": lambda: _CUDA_NUMBER,
        "_cuda_synchronize": lambda: recorder.host_waits(),
        "_cuda_sleep": _nothing,
        "_cuda_ipc_collect": _nothing,
        "_nccl_version": lambda: _NCCL_VERSION[0] << 32 | _NCCL_VERSION[1] << 16 | _NCCL_VERSION[2],
        "_nccl_version_suffix": lambda: b"",
    }


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
        now, peak = recorder.allocated_bytes, recorder.peak_bytes
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
        recorder.peak_bytes = recorder.allocated_bytes

    return {
        "_cuda_memoryStats": stats,
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_resetPeakHostMemoryStats": _nothing,
        "_cuda_resetAccumulatedMemoryStats": _nothing,
        "_cuda_resetAccumulatedHostMemoryStats": _nothing,
        "_cuda_emptyCache": _nothing,
        "_host_emptyCache": _nothing,
        "_cuda_setMemoryFraction": _nothing,
        "_cuda_getMemoryFraction": lambda _index: 1.0,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": _nothing,
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": [], "allocator_settings": {}},
        "_cuda_record_memory_history": _nothing,
        "_cuda_record_memory_history_legacy": _nothing,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_attach_out_of_memory_observer": _nothing,
        "_cuda_setMemoryMetadata": _nothing,
        "_cuda_getMemoryMetadata": lambda: "",
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
        "_set_cached_tensors_enabled": _nothing,
        "_cudart": _runtime(recorder, device),
    }


def _runtime(recorder: Recorder, device: VirtualDevice) -> SimpleNamespace:
    """The functions of the CUDA runtime that torch binds."""

    def memory(_index: int = 0) -> tuple[int, int]:
        return max(0, device.total_memory - recorder.allocated_bytes), device.total_memory

    return SimpleNamespace(
        cudaMemGetInfo=memory,
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=str,
        **dict.fromkeys(("cudaProfilerStart", "cudaProfilerStop", "cudaDeviceSynchronize"), _success),
        **dict.fromkeys(("cudaHostRegister", "cudaHostUnregister"), _success),
    )


def _settings() -> dict[str, Any]:
    """Switches that programs set and read back."""
    kept = {
        "cudnn_benchmark_limit": 10,
        "sync_debug_mode": 0,
        "conv_benchmark_empty_cache": False,
    }
    names: dict[str, Any] = {"_cudnn_set_conv_benchmark_empty_cache": _nothing, "_cuda_clearCublasWorkspaces": _nothing}
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
    """What `torch.accelerator` asks of the device's allocator."""
    memory = _memory_functions(recorder, device)
    return {
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": _nothing,
        "_accelerator_emptyHostCache": _nothing,
        "_accelerator_getDeviceStats": memory["_cuda_memoryStats"],
        "_accelerator_resetAccumulatedStats": _nothing,
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
    """Graphed callables run eagerly: the same kernels, launched one by one."""
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
        "default_generators": tuple(_Generator() for _ in range(count)),
        "utilization": lambda *_: 0,
        "memory_usage": lambda *_: 0,
        "temperature": lambda *_: 0,
        "power_draw": lambda *_: 0,
        "clock_rate": lambda *_: device.clock_rate // 1000,
        "device_memory_used": lambda *_: recorder.allocated_bytes,
        "list_gpu_processes": lambda *_: "",
    }


def _make_again(cuda: Any) -> None:
    """Let torch define its stream, event and graph classes again, on our bases, and put them where the old ones are."""
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


def rebind(new: Mapping[int, Any], prefix: str = "torch") -> None:
    """In every loaded module of a package, let names that stand for the object of an `id` stand for another one.
    torch.compile goes on capturing functions as they were."""
    made: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == prefix or name.startswith(prefix + ".")):
            for key, value in list(vars(module).items()):
                number = id(value)
                if number in new:
                    if number not in made:
                        made[number] = stand_in(value, new[number])
                    setattr(module, key, made[number])


def _elsewhere() -> None:
    """Tensor methods, backends and versions that programs ask on a GPU machine."""
    tensor: Any = torch.Tensor
    tensor.record_stream = _nothing
    tensor.pin_memory = _pin_memory
    tensor.is_pinned = _is_pinned
    version: Any = torch.version
    version.cuda = _CUDA_VERSION
    cudnn: Any = torch.backends.cudnn
    backend = sys.modules["torch.backends.cudnn"]
    for module in {id(cudnn): cudnn, id(backend): backend}.values():
        module.is_available = lambda: True
        module.is_acceptable = lambda _tensor: False
        module.version = lambda: _CUDNN_VERSION
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
"""storages that a program pinned"""


def _is_pinned(self: Any, *_: Any, **__: Any) -> bool:
    return self.device.type == "cpu" and self.untyped_storage()._cdata in _pinned


def _nothing(*_: Any, **__: Any) -> None:
    """For calls whose effect no trace shows."""


def _success(*_: Any, **__: Any) -> int:
    return 0


_UNAVAILABLE = (
    "_cuda_jiterator_compile_and_launch_kernel",
    "_cuda_customAllocator",
    "_cuda_changeCurrentAllocator",
    "_cuda_getAllocator",
    "_cuda_cudaHostAllocator",
    "_cuda_cudaCachingAllocator_raw_alloc",
    "_cuda_cudaCachingAllocator_raw_delete",
    "_cuda_allocationTraceback",
    "_cuda_getCheckpointState",
    "_cuda_setCheckpointPoolState",
    "_cuda_beginAllocateToPool",
    "_cuda_beginAllocateCurrentStreamToPool",
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
    "_cuda_checkPoolLiveAllocations",
    "_cuda_tunableop_read_file",
    "_cuda_tunableop_get_results",
    "_cuda_tunableop_get_validators",
    "_nccl_unique_id",
    "_nccl_init_rank",
    "_nccl_all_reduce",
    "_nccl_reduce",
    "_nccl_broadcast",
    "_nccl_all_gather",
    "_nccl_reduce_scatter",
)
"""functions of `torch._C` that need a GPU"""


def _unavailable(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise ForerunError(f"torch._C.{name}: can't be traced without a GPU")

    return call
