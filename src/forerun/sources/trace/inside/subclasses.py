"""Classes of tensors and parameters that a program defines without operators of their own.

Such a class adds methods and attributes, and its tensors compute like others: images and labels of data libraries,
parameters with marks. torch can't make a fake tensor of another class, so a fake one gets a class that is derived from
both.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

CLASS = "_forerun_class"
"""The attribute of a class of fake tensors that holds the program's own class."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_OPERATORS = torch._C._disabled_torch_dispatch_impl


def is_of_program(tensor: Any) -> bool:
    """Returns whether a real tensor has such a class."""
    cls = type(tensor)
    return cls not in PLAIN and not isinstance(tensor, FakeTensor) and cls.__torch_dispatch__ is _NO_OPERATORS


def as_others(values: Any) -> Any:
    """Returns arguments of an operator without real tensors of such classes."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map_only(torch.Tensor, lambda t: t.as_subclass(torch.Tensor) if is_of_program(t) else t, values)


@functools.cache
def fake_class(cls: Any) -> Any:
    """Returns a class of fake tensors with the attributes of a program's own class `cls`."""
    own = vars(cls).get(CLASS, cls)
    above = [fake_class(one) for one in own.__bases__ if issubclass(one, torch.Tensor) and one not in PLAIN]
    function = inspect.getattr_static(own, "__torch_function__")
    named = {CLASS: own, "__module__": own.__module__, "__torch_function__": function}
    return type(own)(own.__name__, (*(above or [FakeTensor]), own), named)


def install(mode: Any) -> None:
    """Lets programs make fake tensors of their classes in the two ways in which torch makes real ones."""
    tensor_class: Any = torch.Tensor
    make_subclass, as_subclass = tensor_class._make_subclass, tensor_class.as_subclass

    def made_subclass(cls: Any, data: Any, requires_grad: bool = False, **settings: Any) -> Any:
        """Makes a parameter of a program's own class in the way that `Parameter` does it."""
        if issubclass(cls, torch.nn.Parameter) and type(data) in PLAIN and data.device.type == "cpu":
            data = mode.as_fake(data)
        if not isinstance(data, FakeTensor):
            return make_subclass(cls, data, requires_grad, **settings)
        made: Any = data.detach().requires_grad_(requires_grad)
        made._is_param = issubclass(cls, torch.nn.Parameter)
        made.__class__ = fake_class(cls)
        return made

    def seen_as_subclass(self: Any, cls: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return as_subclass(self, vars(cls).get(CLASS, cls))
        with torch._C.DisableTorchFunctionSubclass():
            made = torch.ops.aten.alias.default(self)
        made.__class__ = FakeTensor if cls in (*PLAIN, FakeTensor) else fake_class(cls)
        return made

    tensor_class._make_subclass = staticmethod(made_subclass)
    tensor_class.as_subclass = seen_as_subclass
