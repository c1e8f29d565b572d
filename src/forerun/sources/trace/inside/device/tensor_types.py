"""The tensor types of CUDA, such as `torch.cuda.FloatTensor`: classes that make tensors on the device, and that a
program can make the default. A build of torch for the CPU knows their names and refuses to make anything of them."""

from __future__ import annotations

from typing import Any

import torch

_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class _TensorType(type):
    """The class of `torch.cuda.FloatTensor` and the like, none of which has instances of its own."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        empty: Any = torch.empty(0, dtype=cls.dtype, device="cuda")
        return empty.new(*args, **kwargs)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == cls.dtype


def install() -> None:
    """Replaces the tensor types of `torch.cuda`, and lets a program make one of them the default."""
    cuda: Any = torch.cuda
    for name, dtype in _DTYPES.items():
        # C++ reads the name of the type that `tensor.type` is given.
        made = _TensorType(f"torch.cuda.{name}", (), {"dtype": dtype, "__module__": "torch.cuda", "is_cuda": True})
        setattr(cuda, name, made)
    core: Any = torch._C
    plain, plain_new = core._set_default_tensor_type, torch.Tensor.__new__

    def set_default(kind: Any) -> None:
        on_device = isinstance(kind, _TensorType)
        if on_device:
            torch.set_default_dtype(kind.dtype)
        else:
            plain(kind)
        if on_device or torch.Tensor.__new__ is new:
            torch.set_default_device("cuda" if on_device else "cpu")
        tensor: Any = torch.Tensor
        tensor.__new__ = new if on_device else plain_new

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes what `torch.Tensor(...)` makes, on the device. A default device does not reach this constructor."""
        if cls is not torch.Tensor or "device" in kwargs:
            return plain_new(cls, *args, **kwargs)
        empty: Any = torch.empty(0, device="cuda")
        return empty.new(*args, **kwargs)

    core._set_default_tensor_type = set_default
