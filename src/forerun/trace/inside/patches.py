"""What torch assumes of tensors that have data, changed for fakes. Each patch names the failure that asks for it.

Only ever applied in a process that traces. Tested with torch 2.13.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils.data import DataLoader

from forerun.trace.inside.mode import VirtualMode
from forerun.trace.inside.recorder import Recorder


def install(mode: VirtualMode, recorder: Recorder) -> None:
    """Apply all patches."""
    _fake_parameters(mode)
    _swap_without_weakrefs()
    _multi_tensor_kernels()
    _storages(recorder)
    _quiet_propagation(recorder)
    _data_loaders()
    _initialisation()
    _values(mode)


def _fake_parameters(mode: VirtualMode) -> None:
    """Parameters are fake wherever they are: `Module.to` could not exchange a real one for a fake one and keep its
    identity, which tied weights and optimizers need."""
    make = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type == "cpu":
            data = mode.as_fake(data)
        return make(cls, data, requires_grad)

    torch.nn.Parameter.__new__ = new


def _swap_without_weakrefs() -> None:
    """`_apply(): Couldn't swap Linear.weight`: the fake mode keeps weak references to what it made."""
    torch.utils.swap_tensors = _swap
    for module in list(sys.modules.values()):
        if getattr(module, "swap_tensors", None) is not None and module.__name__.startswith("torch."):
            module.swap_tensors = _swap  # type: ignore[attr-defined]


def _swap(one: Any, other: Any) -> None:
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _multi_tensor_kernels() -> None:
    """Optimizers take the slow loop for tensor types that they don't know."""
    for types in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if FakeTensor not in types:
            types.append(FakeTensor)


def _storages(recorder: Recorder) -> None:
    """FSDP frees and allocates by resizing storages, which no operation shows."""
    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        answer = resize(self, size)
        if recorder.follows(self):
            recorder.allocated(self, size)
        return answer

    torch.UntypedStorage.resize_ = resize_


def _quiet_propagation(recorder: Recorder) -> None:
    """DTensor finds output shapes by running operations on fakes of the whole, unsharded tensors."""
    for name in ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"):
        if hasattr(ShardingPropagator, name):
            setattr(ShardingPropagator, name, _paused(recorder, getattr(ShardingPropagator, name)))


def _paused(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.paused += 1
        try:
            return function(*args, **kwargs)
        finally:
            recorder.paused -= 1

    return call


def _data_loaders() -> None:
    """Worker processes can't hand over tensors of a traced process, and batches are needed only in number."""
    make = DataLoader.__init__
    signature = inspect.signature(make)
    here = {
        "num_workers": 0,
        "pin_memory": False,
        "prefetch_factor": None,
        "multiprocessing_context": None,
        "persistent_workers": False,
        "timeout": 0,
    }

    @functools.wraps(make)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(here)
        make(*bound.args, **bound.kwargs)

    DataLoader.__init__ = init


def _initialisation() -> None:
    """Rejection sampling never ends without data."""

    def trunc_normal_(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    torch.nn.init.trunc_normal_ = trunc_normal_


def _values(mode: VirtualMode) -> None:
    """`tolist` and `numpy` read memory that fakes don't have."""
    for name in ("tolist", "numpy", "__array__"):
        setattr(torch.Tensor, name, _on_host(mode, getattr(torch.Tensor, name)))


def _on_host(mode: VirtualMode, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FakeTensor):
            if self.fake_device.type == "cuda" and method.__name__ != "tolist":
                raise TypeError(f"can't convert {self.device} device type tensor to numpy; use Tensor.cpu() first")
            self = mode.oracle.on_host(self)
        return method(self, *args, **kwargs)

    return call
