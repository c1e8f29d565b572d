"""Sparse tensors on the virtual device: gradients of embeddings made with `sparse=True`, and matrices of graphs.

torch's fake version of a sparse tensor (COO) has a shape and no elements. Beside each, this module keeps its indices
and values as dense fake tensors, and an operation on it becomes the operations on these that CUDA runs. So kernels have
the bytes of the elements, and memory is that of indices and values.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.kernels.tensors import dtype_name
from forerun.sources.trace.inside.values import known_value, set_value

if TYPE_CHECKING:
    from forerun.sources.trace.inside.mode import VirtualMode

aten = torch.ops.aten
_PARTS = "_forerun_parts"
"""The attribute of a fake sparse tensor that holds its parts."""


class _Parts:
    """The indices (dimensions, elements) and values (elements, ...) of a sparse tensor, and whether indices are
    sorted and occur once."""

    __slots__ = ("coalesced", "indices", "values")

    def __init__(self, indices: torch.Tensor, values: torch.Tensor, coalesced: bool) -> None:
        self.indices, self.values, self.coalesced = indices, values, coalesced


def is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.sparse_coo


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that hold the memory of `tensor`: itself, or indices and values of a sparse one."""
    if not is_sparse(tensor):
        return [tensor]
    parts = vars(tensor).get(_PARTS)
    return [] if parts is None else [parts.indices, parts.values]


def concerns(func: Any, tensors: list[torch.Tensor], args: Any) -> bool:
    """Returns whether an operation makes a sparse tensor or is given one."""
    return func in _MAKERS or any(t.layout is torch.sparse_coo for t in tensors) or _sparse_bags(func, args)


def run(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation that `concerns` sparse tensors.

    Raises:
        ForerunError: nothing is known about the operation.
    """
    rule = _MAKERS.get(func) or _RULES.get(func) or _elementwise(func, args)
    with mode:
        if rule is not None:
            return rule(mode, *args, **kwargs)
        if _sparse_bags(func, args):
            return _bags(mode, *args)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            return func.decompose(*args, **kwargs)
    raise ForerunError(f"{func}: can't be traced with sparse tensors; a dense gradient or matrix can")


def _parts(tensor: Any) -> _Parts:
    if isinstance(tensor, FakeTensor):
        return vars(tensor)[_PARTS]
    return _Parts(tensor._indices(), tensor._values(), tensor.is_coalesced())


def _made(mode: VirtualMode, size: Any, parts: _Parts) -> torch.Tensor:
    """Returns a fake sparse tensor of `size` with these parts."""
    n_sparse, values = parts.indices.shape[0], parts.values
    dense = len(size) - n_sparse
    options = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device}
    fake: torch.Tensor = _fake(mode, aten._sparse_coo_tensor_with_dims.default, n_sparse, dense, list(size), **options)
    vars(fake)[_PARTS] = parts
    return fake


def _fake(mode: VirtualMode, func: Any, *args: Any, **options: Any) -> Any:
    with _disable_current_modes():
        return mode.fake.dispatch(func, (), args, options)


# -- what makes them ---------------------------------------------------------------------------------------------


def _of_parts(
    mode: VirtualMode,
    n_sparse: int,
    n_dense: int,
    size: Any,
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    is_coalesced: bool | None = None,
    **_: Any,
) -> torch.Tensor:
    parts = _Parts(aten.detach.default(indices), aten.detach.default(values), bool(is_coalesced))
    return _made(mode, size, parts)


def _empty(mode: VirtualMode, n_sparse: int, n_dense: int, size: Any, **options: Any) -> torch.Tensor:
    device = options.get("device") or torch.device("cpu")
    indices = torch.empty((n_sparse, 0), dtype=torch.int64, device=device)
    values = torch.empty((0, *size[n_sparse:]), dtype=options.get("dtype"), device=device)
    return _made(mode, size, _Parts(indices, values, True))


def _sparse_bags(func: Any, args: Any) -> bool:
    return func is aten._embedding_bag_backward.default and bool(args[9])


def _bags(mode: VirtualMode, *args: Any) -> Any:
    """The gradient of an embedding's bags is composed of operations, of which the fake version knows nothing."""
    grad, indices, offsets, of_index, bag_size, _, n_rows, scale, how, _, weights, *rest = args
    sparse: Any = aten._embedding_bag_sparse_backward.default
    given = (grad, indices, offsets, of_index, bag_size, n_rows, scale, how, weights, *rest)
    return sparse.decompose(*given)


# -- what they consist of ----------------------------------------------------------------------------------------


def _indices(mode: VirtualMode, tensor: Any) -> torch.Tensor:
    return aten.detach.default(_parts(tensor).indices)


def _values(mode: VirtualMode, tensor: Any) -> torch.Tensor:
    return aten.detach.default(_parts(tensor).values)


def _n_elements(mode: VirtualMode, tensor: Any) -> int:
    return int(_parts(tensor).values.shape[0])


def _n_sparse(mode: VirtualMode, tensor: Any) -> int:
    return int(_parts(tensor).indices.shape[0])


def _n_dense(mode: VirtualMode, tensor: Any) -> int:
    return int(_parts(tensor).values.dim()) - 1


def _is_coalesced(mode: VirtualMode, tensor: Any) -> bool:
    return _parts(tensor).coalesced


def _mark_coalesced(mode: VirtualMode, tensor: Any, coalesced: bool) -> Any:
    _parts(tensor).coalesced = coalesced
    return tensor


def _same(mode: VirtualMode, tensor: Any) -> torch.Tensor:
    return _made(mode, tensor.shape, _parts(tensor))


# -- copies ------------------------------------------------------------------------------------------------------


def _cloned(mode: VirtualMode, tensor: Any, **_: Any) -> torch.Tensor:
    parts = _parts(tensor)
    return _made(mode, tensor.shape, _Parts(parts.indices.clone(), parts.values.clone(), parts.coalesced))


def _converted(mode: VirtualMode, tensor: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    parts = _parts(tensor)
    device = device or parts.values.device
    indices = aten._to_copy.default(parts.indices, device=device)
    values = aten._to_copy.default(parts.values, dtype=dtype or parts.values.dtype, device=device)
    if torch.device(device).type == "cpu" and not any(isinstance(part, FakeTensor) for part in (indices, values)):
        with _disable_current_modes():
            return aten._sparse_coo_tensor_with_dims_and_tensors.default(
                _n_sparse(mode, tensor),
                _n_dense(mode, tensor),
                list(tensor.shape),
                indices,
                values,
                dtype=values.dtype,
                layout=torch.sparse_coo,
                device=values.device,
                is_coalesced=parts.coalesced,
            )
    return _made(mode, tensor.shape, _Parts(indices, values, parts.coalesced))


def _copied_into(mode: VirtualMode, target: Any, source: Any, *_: Any) -> Any:
    if not (is_sparse(target) and is_sparse(source)):
        raise RuntimeError("copy_() between dense and sparse Tensors is not implemented!")
    made = _converted(mode, source, dtype=target.dtype, device=target.device)
    vars(target)[_PARTS] = _parts(made)
    return target


def _emptied(mode: VirtualMode, tensor: Any) -> Any:
    vars(tensor)[_PARTS] = _parts(
        _empty(mode, _n_sparse(mode, tensor), 0, tensor.shape, dtype=tensor.dtype, device=tensor.device)
    )
    return tensor


# -- arithmetic --------------------------------------------------------------------------------------------------


def _flat(parts: _Parts, size: Any) -> torch.Tensor:
    """Returns the indices of the elements in the sparse dimensions taken as one."""
    flat = parts.indices[0]
    for dim in range(1, parts.indices.shape[0]):
        flat = flat * size[dim] + parts.indices[dim]
    return flat


def _coalesce(mode: VirtualMode, tensor: Any) -> torch.Tensor:
    """Sorts the elements and adds those with the same indices (SparseCUDATensor.cu); the host waits to learn how many
    there are. Where indices are not known, each occurs once."""
    parts = _parts(tensor)
    if parts.coalesced:
        return _same(mode, tensor)
    n_sparse, n = parts.indices.shape[0], parts.values.shape[0]
    if n < 2:
        return _made(mode, tensor.shape, _Parts(parts.indices, parts.values, True))
    known = known_value(parts.indices)
    distinct = None if known is None else torch.unique(known, dim=1)
    flat = _flat(parts, tensor.shape)
    _, order = flat.sort()
    count = min(n, prod(tensor.shape[:n_sparse])) if distinct is None else distinct.shape[1]
    order[0].item()
    indices = parts.indices.new_empty((n_sparse, count))
    if distinct is not None:
        set_value(indices, distinct)
    values = parts.values.new_zeros((count, *parts.values.shape[1:])).index_add_(0, order, parts.values)
    return _made(mode, tensor.shape, _Parts(indices, values, True))


def _add(mode: VirtualMode, one: Any, other: Any, *, alpha: Any = 1) -> Any:
    if is_sparse(one) and is_sparse(other):
        first, second = _parts(one), _parts(other)
        values = second.values if alpha == 1 else second.values * alpha
        joined = torch.cat([first.indices, second.indices], 1), torch.cat([first.values, values])
        return _made(mode, one.shape, _Parts(*joined, False))
    if is_sparse(one):
        one, other = (other if alpha == 1 else other * alpha), one
        alpha = 1
    return _add_into(mode, one.clone(), other, alpha=alpha)


def _add_into(mode: VirtualMode, target: Any, other: Any, *, alpha: Any = 1) -> Any:
    if is_sparse(target):
        vars(target)[_PARTS] = _parts(_add(mode, target, other, alpha=alpha))
        return target
    parts, n_sparse = _parts(other), _n_sparse(mode, other)
    rows = target.reshape(prod(target.shape[:n_sparse]), *target.shape[n_sparse:])
    rows.index_add_(0, _flat(parts, other.shape), parts.values, alpha=alpha)
    return target


def _sub(mode: VirtualMode, one: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _add(mode, one, other, alpha=-alpha)


def _sub_into(mode: VirtualMode, one: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _add_into(mode, one, other, alpha=-alpha)


def _dense(mode: VirtualMode, tensor: Any, dtype: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    zeros = torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
    return _add_into(mode, zeros, tensor)


def _masked(mode: VirtualMode, tensor: Any, mask: Any, *_: Any, **__: Any) -> torch.Tensor:
    parts, n_sparse = _parts(mask), _n_sparse(mode, mask)
    rows = tensor.reshape(prod(tensor.shape[:n_sparse]), *tensor.shape[n_sparse:])
    values = rows.index_select(0, _flat(parts, mask.shape))
    return _made(mode, mask.shape, _Parts(parts.indices, values, parts.coalesced))


def _transposed(mode: VirtualMode, tensor: Any, one: int = 0, other: int = 1) -> torch.Tensor:
    parts = _parts(tensor)
    size, rows = list(tensor.shape), list(parts.indices.unbind())
    for places in (size, rows):
        places[one], places[other] = places[other], places[one]
    swapped = torch.stack(rows)
    return _made(mode, size, _Parts(swapped, parts.values, False))


def _product(mode: VirtualMode, sparse: Any, dense: Any, **_: Any) -> torch.Tensor:
    """The product of a sparse and a dense matrix: cuSPARSE reads a row of the dense one for each element."""
    if not is_sparse(sparse) or is_sparse(dense):
        raise ForerunError("a product of two sparse matrices, or of a dense one by a sparse one, can't be traced")
    parts = _parts(_coalesce(mode, sparse))
    n, columns = parts.values.shape[0], dense.shape[1]
    read = n * columns * dense.itemsize + parts.indices.numel() * parts.indices.itemsize + n * parts.values.itemsize
    written = sparse.shape[0] * columns * dense.itemsize
    recorder = mode.recorder
    row = recorder.ops.memory("sparse_mm", read, written, 1, 2.0 * n * columns, dtype_name(dense))
    node = recorder.node(row) if dense.device.type == "cuda" else -1
    size = [sparse.shape[0], columns]
    out: torch.Tensor = _fake(mode, aten.empty.memory_format, size, dtype=dense.dtype, device=dense.device)
    mode.seen(out, node)
    return out


def _product_added(mode: VirtualMode, added: Any, sparse: Any, dense: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    out = _product(mode, sparse, dense)
    out = out if alpha == 1 else out * alpha
    return out if beta == 0 else out.add_(added, alpha=beta)


def _elementwise(func: Any, args: Any) -> Callable[..., Any] | None:
    """Returns the rule of an operation on one sparse tensor and numbers that runs on its values alone."""
    if not getattr(func, "_schema", None) or torch.Tag.pointwise not in func.tags or not is_sparse(args[0]):
        return None
    if any(isinstance(arg, torch.Tensor) and arg.dim() for arg in args[1:]):
        return None

    def rule(mode: VirtualMode, tensor: Any, *rest: Any, **kwargs: Any) -> Any:
        parts = _parts(tensor)
        values = func(parts.values, *rest, **kwargs)
        if values is parts.values:
            return tensor
        return _made(mode, tensor.shape, _Parts(parts.indices, values, parts.coalesced))

    return rule


_MAKERS: dict[Any, Callable[..., Any]] = {
    aten._sparse_coo_tensor_with_dims_and_tensors.default: _of_parts,
    aten._sparse_coo_tensor_with_dims.default: _empty,
}
_RULES: dict[Any, Callable[..., Any]] = {
    aten._indices.default: _indices,
    aten.indices.default: _indices,
    aten._values.default: _values,
    aten.values.default: _values,
    aten._nnz.default: _n_elements,
    aten.sparse_dim.default: _n_sparse,
    aten.dense_dim.default: _n_dense,
    aten.is_coalesced.default: _is_coalesced,
    aten._coalesced_.default: _mark_coalesced,
    aten._coalesce.default: _coalesce,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _cloned,
    aten._to_copy.default: _converted,
    aten.copy_.default: _copied_into,
    aten.zero_.default: _emptied,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_into,
    aten.sub.Tensor: _sub,
    aten.sub_.Tensor: _sub_into,
    aten._to_dense.default: _dense,
    aten.sparse_mask.default: _masked,
    aten.transpose.int: _transposed,
    aten.t.default: _transposed,
    aten.mm.default: _product,
    aten.addmm.default: _product_added,
    aten._sparse_addmm.default: _product_added,
}
