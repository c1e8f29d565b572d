"""Storages on the virtual device: `torch.load(map_location="cuda")`, `storage.cuda()`, `UntypedStorage(device="cuda")`.

torch has no storage on a device without memory. Here it is the storage of a fake tensor, which is on the device meta,
and remembers the device that it stands for, so that tensors made of it are fake tensors on that device.
"""

# mypy: disable-error-code="assignment, method-assign"
# This module replaces functions of torch, which torch's types don't allow.
from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from forerun.sources.trace.inside.mode import VirtualMode
from forerun.sources.trace.inside.unseen import stand_in
from forerun.sources.trace.inside.values import set_value

_KNOWN_BYTES = 1 << 16
"""The largest storage whose values are kept: lengths, masks, positions."""
_DEVICE, _VALUES = "_forerun_device", "_forerun_values"


def install(mode: VirtualMode) -> None:
    """Lets programs make storages on the device, and tensors of them."""
    storage_class: Any = torch.UntypedStorage
    make, move = storage_class.__new__, storage_class.to

    def on_device(size_bytes: int, device: torch.device) -> Any:
        with mode:
            made = torch.empty(size_bytes, dtype=torch.uint8, device=device).untyped_storage()
        setattr(made, _DEVICE, device)
        return made

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            return on_device(int(args[0]) if args and isinstance(args[0], int) else 0, torch.device(device))
        return make(cls, *args, **kwargs) if device is None else make(cls, *args, device=device, **kwargs)

    def to(self: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        wanted = torch.device(args[0] if device is None and args else device)
        if wanted.type != "cuda" or self.device.type != "cpu":
            return move(self, device=wanted, **kwargs)
        made = on_device(self.nbytes(), wanted)
        if self.nbytes() <= _KNOWN_BYTES:
            setattr(made, _VALUES, self)
        return made

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        return to(self, device=torch.device("cuda", torch.cuda.current_device() if device is None else device))

    share, is_shared = storage_class.share_memory_, storage_class.is_shared

    def share_memory_(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.device.type == "meta" else share(self, *args, **kwargs)

    storage_class.__new__, storage_class.to, storage_class.cuda = new, to, cuda
    storage_class.share_memory_ = share_memory_
    storage_class.is_shared = lambda self: self.device.type == "meta" or is_shared(self)
    _rebuild_on_device(mode)
    _slices(mode)


class _Slice:
    """Part of a storage on the device: `storage[a:b]`. `set_` makes a tensor from it."""

    def __init__(self, storage: Any, device: torch.device, start: int, stop: int) -> None:
        self.storage, self.device, self.start, self._stop = storage, device, start, stop

    def __len__(self) -> int:
        return self._stop - self.start

    size = nbytes = __len__

    def __getitem__(self, part: slice) -> _Slice:
        start, stop, _ = part.indices(len(self))
        return _Slice(self.storage, self.device, self.start + start, self.start + max(start, stop))

    def data_ptr(self) -> int:
        return int(self.storage.data_ptr()) + self.start

    def untyped(self) -> _Slice:
        return self


def _slices(mode: VirtualMode) -> None:
    """Lets programs take parts of a storage, as those do that lay tensors into one buffer. torch has no part of a
    storage without memory."""
    storage_class: Any = torch.UntypedStorage
    item, set_ = storage_class.__getitem__, torch.Tensor.set_

    def part_of(self: Any, part: Any) -> Any:
        if self.device.type != "meta" or not isinstance(part, slice):
            return item(self, part)
        device = getattr(self, _DEVICE, torch.device("cuda", torch.cuda.current_device()))
        return _Slice(self, device, 0, self.nbytes())[part]

    def from_part(self: Any, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(source, _Slice):
            return set_(self, *(() if source is None else (source,)), *args, **kwargs)
        first, rest = divmod(source.start, self.itemsize)
        if rest:
            raise RuntimeError(f"the storage begins at byte {source.start}, between two elements of {self.dtype}")
        count = len(source) // self.itemsize
        given = dict(zip(("offset", "size", "stride"), args, strict=False))
        offset, size, stride = given.get("offset", 0), given.get("size", (count,)), given.get("stride", (1,))
        setattr(source.storage, _DEVICE, source.device)
        self.data = _tensor_of(mode, source.storage, self.dtype, first + offset, size, stride)
        return self

    storage_class.__getitem__ = part_of
    torch.Tensor.set_ = stand_in(set_, from_part)


def _rebuild_on_device(mode: VirtualMode) -> None:
    """Makes the tensors of a checkpoint fake where their storages are on the device."""
    module: Any = torch._utils
    plain, with_dtype = module._rebuild_tensor, module._rebuild_tensor_v3

    def rebuild(storage: Any, offset: int, size: Any, stride: Any) -> Any:
        if not hasattr(storage._untyped_storage, _DEVICE):
            return plain(storage, offset, size, stride)
        return _tensor_of(mode, storage._untyped_storage, storage.dtype, offset, size, stride)

    @functools.wraps(with_dtype)  # by whose name torch.load knows that it is safe
    def rebuild_v3(
        storage: Any, offset: int, size: Any, stride: Any, grad: bool, hooks: Any, dtype: Any, *rest: Any
    ) -> Any:
        if not hasattr(storage._untyped_storage, _DEVICE):
            return with_dtype(storage, offset, size, stride, grad, hooks, dtype, *rest)
        made = _tensor_of(mode, storage._untyped_storage, dtype, offset, size, stride).requires_grad_(grad)
        made._backward_hooks = hooks
        return made

    module._rebuild_tensor, module._rebuild_tensor_v3 = rebuild, rebuild_v3


def _tensor_of(mode: VirtualMode, storage: Any, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> Any:
    """Returns the fake tensor on the storage's device that has this storage."""
    meta = torch.empty((0,), dtype=dtype, device="meta").set_(storage, offset, size, stride)
    made: Any = FakeTensor(mode.fake, meta, getattr(storage, _DEVICE))
    values = getattr(storage, _VALUES, None)
    if values is not None:
        set_value(made, torch.empty((0,), dtype=dtype).set_(values, offset, size, stride))
    return made
