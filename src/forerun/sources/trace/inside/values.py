"""Known values of small tensors on the virtual device, and the oracle that answers for unknown ones.

Device tensors are fake, but programs branch on small ones: masks, lengths, token counts, indices. A value that is
computed from known values alone is computed for real on the CPU beside the fake, so `.item()`, `nonzero` or a split by
counts give the true answer. Where a value depends on weights or activations, the oracle answers:

* a float that the host reads is 1.0, an integer 1, a boolean False; `all` is True, `any` is False;
* numbers are finite: `isnan` and `isinf` are False everywhere, and `found_inf` of a gradient scaler stays 0;
* `topk` picks experts (or anything else) in turn, so that every choice is equally frequent; `Oracle.skew` makes the
  first ones more frequent. `argmax`, `sort` and `multinomial` give valid indices the same way;
* a mask selects everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
KNOWN = "_forerun_known"
"""The attribute of a fake tensor that holds its value."""
_MOST_FLOATS = 1 << 16
_MOST_INTEGERS = 1 << 21
_CPU = torch.device("cpu")


class _Known:
    """A value, and whether it still holds for all views of its storage."""

    __slots__ = ("holds", "value")

    def __init__(self, value: torch.Tensor, holds: list[bool]) -> None:
        self.value, self.holds = value, holds


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the value of a tensor if it is known. A real CPU tensor is its own value."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.device.type == "cpu" else None
    known = tensor.__dict__.get(KNOWN)
    return known.value if known is not None and known.holds[0] else None


def set_value(tensor: torch.Tensor, value: torch.Tensor, holds: list[bool] | None = None) -> None:
    """Makes `value` the known value of fake `tensor`; the views of one storage share `holds`."""
    if isinstance(tensor, FakeTensor) and (_small(value) or _constant(value)):
        tensor.__dict__[KNOWN] = _Known(value, [True] if holds is None else holds)


def share_value(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Gives fake `tensor` the known value of fake `other`, whose storage it shares."""
    known = other.__dict__.get(KNOWN)
    if known is None:
        tensor.__dict__.pop(KNOWN, None)
    else:
        tensor.__dict__[KNOWN] = known


def forget(tensor: torch.Tensor) -> None:
    """Makes the value of a fake tensor, and of all views of its storage, unknown."""
    known = tensor.__dict__.get(KNOWN) if isinstance(tensor, FakeTensor) else None
    if known is not None:
        known.holds[0] = False


def _small(tensor: torch.Tensor) -> bool:
    most = _MOST_FLOATS if tensor.dtype.is_floating_point or tensor.dtype.is_complex else _MOST_INTEGERS
    return tensor.numel() <= most and tensor.layout == torch.strided


def _constant(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is one element that is expanded."""
    if tensor.layout != torch.strided:
        return False
    return all(n == 1 or stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Oracle:
    """Computes known values along with the fakes, and answers for unknown ones."""

    def __init__(self, skew: float = 0.0) -> None:
        self.skew = skew
        """0: choices are balanced; s: choice number i is picked in proportion to 1 / (i + 1) ** s (Zipf)."""
        self.on_write: Callable[[Sequence[torch.Tensor]], None] | None = None
        """Called with the tensors that an operation writes to."""
        self._writes: dict[Any, tuple[tuple[int, str], ...]] = {}

    # -- along with the fakes ---------------------------------------------------------------------------------

    def follow(self, func: Any, tensors: Sequence[torch.Tensor], args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Computes the values of the outputs of `func` where the values of all `tensors` (its inputs) are known."""
        written = self._written(func, args, kwargs)
        if written and self.on_write is not None:
            self.on_write(written)
        if func in _FILLS:
            args, tensors = (torch.empty((), dtype=args[0].dtype).expand(args[0].shape), *args[1:]), ()
        values = [known_value(t) for t in tensors]
        if any(v is None for v in values) or func in _UNKNOWABLE:
            self._guess(func, args, kwargs, out)
            if func not in _KEEPS_VALUE:
                for tensor in written:
                    forget(tensor)
            return
        outputs = [t for t in _flat(out) if isinstance(t, FakeTensor)]
        large = any(v is not None and not _small(v) for v in values)
        if large and not written and len(outputs) == 1 and all(v is not None and _constant(v) for v in values):
            self._follow_constants(func, args, kwargs, outputs[0])
            return
        if not all(_small(t) for t in outputs) or not all(_small(v) for v in values if v is not None):
            for tensor in written:
                forget(tensor)
            return
        try:
            real = _ON_CPU.get(func, func)(*_real(args), **_real(kwargs))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            for tensor in written:
                forget(tensor)
            return
        roots = {v.untyped_storage()._cdata: t for t, v in zip(tensors, values, strict=True) if v is not None}
        for fake, value in zip(_flat(out), _flat(real), strict=False):
            if isinstance(fake, FakeTensor) and isinstance(value, torch.Tensor) and fake.shape == value.shape:
                root = roots.get(value.untyped_storage()._cdata)
                if root is fake:
                    continue
                known = None if root is None else root.__dict__.get(KNOWN)
                set_value(fake, value, None if known is None else known.holds)

    def _follow_constants(self, func: Any, args: Any, kwargs: dict[str, Any], out: torch.Tensor) -> None:
        """Computes one element of a result that is the same everywhere, as its arguments are: whether numbers are
        finite."""
        given = _one_element(_real(args))
        same = torch.Tag.pointwise in func.tags or func in _SAME_OF_CONSTANTS
        if not same and (func not in _ZERO_OF_ZEROS or bool(given[0].any())):
            return
        made = func(*given, **_one_element(_real(kwargs)))
        if isinstance(made, torch.Tensor) and made.numel() == 1:
            set_value(out, made.reshape(()).expand(out.shape))

    def overwritten(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes the values of `tensors` unknown, which something other than an operation of torch wrote to."""
        if tensors and self.on_write is not None:
            self.on_write(tensors)
        for tensor in tensors:
            forget(tensor)

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        places = self._writes.get(func)
        if places is None:
            schema = getattr(func, "_schema", None)
            arguments = [] if schema is None else schema.arguments
            places = self._writes[func] = tuple(
                (i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
            )
        found: list[torch.Tensor] = []
        for i, name in places:
            found += _tensors_of(args[i] if i < len(args) else kwargs.get(name))
        return found

    # -- what nobody can know ---------------------------------------------------------------------------------

    def _guess(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        rule = _GUESSES.get(func)
        if rule is not None:
            rule(self, args, kwargs, out)

    def choices(self, shape: Sequence[int], n: int) -> torch.Tensor:
        """Returns indices below `n`, without repetition in the last dimension, equally frequent apart from the skew."""
        *rows_shape, k = shape if len(shape) else (1,)
        rows = int(np.prod(rows_shape)) if rows_shape else 1
        if not self.skew:
            flat = (np.arange(rows * k) % max(1, n)).reshape(rows, k)
        else:
            weight = 1.0 / np.arange(1, n + 1) ** self.skew
            keys = np.random.default_rng(0).gumbel(size=(rows, n)) + np.log(weight)
            flat = np.argpartition(-keys, min(k, n - 1), axis=1)[:, :k]
        return torch.from_numpy(flat.astype(np.int64)).reshape(tuple(shape))

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Returns the result of `.item()`."""
        value = known_value(tensor)
        if value is not None:
            return aten._local_scalar_dense.default(value)
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.dtype.is_floating_point else 1

    def equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Returns the result of `torch.equal`, which is True for equal shapes where a value is unknown."""
        values = known_value(one), known_value(other)
        unknown = any(value is None for value in values)
        return one.shape == other.shape if unknown else aten.equal.default(*values)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a real CPU tensor for a small device tensor: its value, or the result of `.item()` for each
        element."""
        with _disable_current_modes():
            value = known_value(tensor)
            if value is not None:
                return value.clone()
            fill = 0 if tensor.dtype == torch.bool else 1
            return torch.full(tensor.shape, fill, dtype=tensor.dtype)

    def shape_of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | Sequence[torch.Tensor] | None:
        """Returns the real result of an operation whose output shape depends on data; None for any other operation."""
        rule = _DYNAMIC.get(func)
        return None if rule is None else rule(self, func, args, kwargs)


# -- operations with outputs of a shape that depends on data ----------------------------------------------------


def _real(value: Any) -> Any:
    """Returns arguments with known values in place of tensors, on the CPU."""
    if isinstance(value, torch.Tensor):
        return known_value(value)
    if isinstance(value, torch.device):
        return _CPU
    if isinstance(value, (list, tuple)):
        return type(value)(_real(v) for v in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {k: _CPU if k == "device" and v is not None else _real(v) for k, v in value.items() if k != "pin_memory"}
    return value


def _one_element(value: Any) -> Any:
    """Returns arguments with one element in place of each tensor that is the same everywhere."""
    if isinstance(value, torch.Tensor):
        return value[(slice(0, 1),) * value.dim()]
    if isinstance(value, (list, tuple)):
        return type(value)(map(_one_element, value))
    return {k: _one_element(v) for k, v in value.items()} if isinstance(value, dict) else value


def _nonzero(oracle: Oracle, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    value = known_value(args[0])
    return torch.nonzero(torch.ones(args[0].shape, dtype=torch.bool) if value is None else value)


def _masked_select(oracle: Oracle, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    mask = known_value(args[1])
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    count = int(np.prod(shape)) if mask is None else int(mask.expand(shape).sum())
    return torch.empty(count, dtype=args[0].dtype, device="meta")


def _unique(oracle: Oracle, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    value = known_value(args[0])
    if value is None:
        value = torch.arange(args[0].numel()).reshape(args[0].shape).to(args[0].dtype)
    return func(value, *args[1:], **kwargs)


def _repeat_interleave(oracle: Oracle, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    value = known_value(args[0])
    total = kwargs.get("output_size")
    if value is None:
        share = 1 if total is None else max(1, int(total) // max(1, args[0].numel()))
        value = torch.full(args[0].shape, share, dtype=args[0].dtype)
    return torch.repeat_interleave(value)


def _bincount(oracle: Oracle, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    least = int(kwargs.get("minlength", args[2] if len(args) > 2 else 0))
    value = known_value(args[0])
    if value is None:
        bins = max(1, least)
        value = oracle.choices((args[0].numel(),), bins)
    return torch.bincount(value, minlength=least)


_DYNAMIC: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
}


# -- guesses -------------------------------------------------------------------------------------------------------


def _guess_topk(oracle: Oracle, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    dim = args[2] if len(args) > 2 else -1
    indices = out[1]
    if indices.dim() and _small(indices):
        moved = indices.movedim(dim, -1) if dim not in (-1, indices.dim() - 1) else indices
        value = oracle.choices(tuple(moved.shape), args[0].shape[dim])
        set_value(indices, value.movedim(-1, dim).contiguous() if moved is not indices else value)


def _guess_sort(oracle: Oracle, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    indices = out[1]
    if indices.dim() and _small(indices):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        shape = [1] * indices.dim()
        shape[dim] = indices.shape[dim]
        set_value(indices, torch.arange(indices.shape[dim]).reshape(shape).expand(indices.shape).contiguous())


def _guess_argmax(oracle: Oracle, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    n = args[0].shape[args[1]] if len(args) > 1 and args[1] is not None and args[0].dim() else args[0].numel()
    if _small(out):
        set_value(out, oracle.choices((*out.shape, 1), n).reshape(out.shape))


def _guess_multinomial(oracle: Oracle, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    if _small(out):
        set_value(out, oracle.choices(tuple(out.shape), args[0].shape[-1]))


def _guess_all(oracle: Oracle, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    set_value(out, torch.ones(out.shape, dtype=out.dtype))


def _guess_not_finite(oracle: Oracle, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    set_value(out, torch.zeros((), dtype=out.dtype).expand(out.shape))


def _guess_is_itself(oracle: Oracle, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    if args[0] is args[1]:
        set_value(out, torch.ones((), dtype=out.dtype).expand(out.shape))


def _guess_is_not_itself(oracle: Oracle, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    if args[0] is args[1]:
        _guess_not_finite(oracle, args, kwargs, out)


def _guess_is_not_infinite(oracle: Oracle, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    if args[1] == float("inf"):
        set_value(out, torch.ones((), dtype=out.dtype).expand(out.shape))


_GUESSES: dict[Any, Callable[[Oracle, Any, dict[str, Any], Any], None]] = {
    aten.topk.default: _guess_topk,
    aten.sort.default: _guess_sort,
    aten.sort.stable: _guess_sort,
    aten.argmax.default: _guess_argmax,
    aten.argmin.default: _guess_argmax,
    aten.multinomial.default: _guess_multinomial,
    aten.all.default: _guess_all,
    aten._is_all_true.default: _guess_all,
    aten.all.dim: _guess_all,
    aten.isnan.default: _guess_not_finite,
    aten.isinf.default: _guess_not_finite,
    aten.eq.Tensor: _guess_is_itself,
    aten.ne.Tensor: _guess_is_not_itself,
    aten.ne.Scalar: _guess_is_not_infinite,
}
_SAME_OF_CONSTANTS = {
    aten._to_copy.default,
    aten.max.default,
    aten.min.default,
    aten.amax.default,
    aten.amin.default,
    aten.any.default,
    aten.any.dim,
    aten.all.default,
    aten.all.dim,
}
"""These operators make one constant of another, however many elements it has; so do pointwise ones."""
_ZERO_OF_ZEROS = {aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default}
_KEEPS_VALUE = {
    aten._amp_foreach_non_finite_check_and_unscale_.default,
    aten._amp_update_scale_.default,
}
"""These operators write to tensors whose known values remain the oracle's answer."""


def _histogram(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.histc(tensor.double(), *args, **kwargs).to(tensor.dtype)


_FILLS = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""These operators use only the shape and dtype of their tensor."""
_ON_CPU: dict[Any, Callable[..., Any]] = {aten.histc.default: _histogram}
"""Operators that CUDA has for integers and the CPU has not."""
_UNKNOWABLE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tensors_of(value: Any) -> list[torch.Tensor]:
    return [t for t in _flat(value) if isinstance(t, torch.Tensor)]
