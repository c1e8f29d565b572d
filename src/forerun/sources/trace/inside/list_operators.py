"""Finds the results of operators over lists of tensors, such as `_foreach_add`, from one tensor of each kind.

The fake version of such an operator runs an operator for each tensor of the list. Tensors of equal shape, strides and
dtype have equal results, and the lists of an optimizer hold hundreds of tensors of a few kinds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_PREFIX = "_foreach_"


def install() -> None:
    """Makes fake modes compute operators over lists on one tensor of each kind."""
    plain = FakeTensorMode._dispatch_impl

    @functools.wraps(plain)
    def dispatch(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kinds = _kinds(self, func, args, kwargs)
        if kinds is None:
            return plain(self, func, types, args, kwargs)
        places = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
        if len(places) == len(kinds):
            return plain(self, func, types, args, kwargs)
        ones = [[arg[place] for place in places.values()] if isinstance(arg, list | tuple) else arg for arg in args]
        found: Any = plain(self, func, types, ones, kwargs)
        if found is None:
            return None
        of_kind = dict(zip(places, found, strict=True))
        first = {places[kind]: tensor for kind, tensor in of_kind.items()}
        return [first[i] if i in first else another(self, of_kind[kind]) for i, kind in enumerate(kinds)]

    FakeTensorMode._dispatch_impl = dispatch


def _kinds(mode: Any, func: Any, args: Any, kwargs: Any) -> list[tuple[Any, ...]] | None:
    """Returns the keys that determine the result for each tensor of the lists. Returns None if the operator does not
    work tensor by tensor.
    """
    if not isinstance(func, torch._ops.OpOverload) or not func._opname.startswith(_PREFIX):
        return None
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    if not lists or len({len(one) for one in lists}) > 1 or any(isinstance(v, list | tuple) for v in kwargs.values()):
        return None
    tensors = [item for one in lists for item in one if isinstance(item, torch.Tensor)]
    if not all(map(functools.partial(_is_plain, mode), tensors)):
        return None
    return [_kind(items) for items in zip(*lists, strict=True)]


def _is_plain(mode: Any, tensor: torch.Tensor) -> bool:
    return (
        isinstance(tensor, FakeTensor)
        and tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor._has_symbolic_sizes_strides
    )


def _kind(items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        (item.shape, item.stride(), item.dtype, item.fake_device, item.requires_grad)
        if isinstance(item, FakeTensor)
        else type(item)
        for item in items
    )


def another(mode: Any, made: Any) -> Any:
    """Returns a new fake tensor like `made`, in memory of its own."""
    with in_kernel_invocation_manager(mode):
        memory = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="meta")
    return FakeTensor(mode, memory, made.fake_device)
