"""Rules of memory-bound ops that don't simply read every input once and write every output once in one kernel.

A gather reads only the rows that it takes, and a scatter writes only the rows that it hits. Backward passes of slices
fill the whole gradient first, lists of tensors go through multi-tensor kernels, and copies may leave the device.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch

from forerun.core.program.builder import OpTableBuilder
from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.kernels.tensors import (
    Arguments,
    Call,
    Kernel,
    all_bytes,
    as_int,
    by_bytes,
    bytes_of,
    dtype_name,
    first_tensor,
    memory,
    on_host,
    shape_of,
    traffic,
)

_FP32 = 4
_INDEX = 8
_CUDA = read_data("kernels/cuda_kernels.yaml")
_EMBEDDING: dict[str, int] = _CUDA["embedding_backward"]
_SORT: dict[str, int] = _CUDA["sort"]
_MULTI_TENSOR = _CUDA["multi_tensor"]


# -- copies ----------------------------------------------------------------------------------------------------


def _copied(call: Call, source: torch.Tensor, target: torch.Tensor) -> list[Kernel]:
    """Returns a copy between host and device (at::native::copy_kernel_cuda).

    Dtypes are converted on the host: a copy from the device has the source's dtype, one to it the target's. If the
    device tensor's layout differs from the host's, a kernel changes it. The host waits unless the call is
    `non_blocking`.
    """
    leaves, waits = on_host(target), not call.argument("non_blocking")
    size = prod(shape_of(target)) * (source if leaves else target).itemsize
    if size <= 0:
        return []
    copy = Kernel(call.table.host_copy(call.name, size, dtype_name(source)), 0, True, waits)
    on_device = source if leaves else target
    if on_device.is_contiguous() or on_device.stride() == (target if leaves else source).stride():
        return [copy]
    read = bytes_of(on_device) if leaves else size
    row = Kernel(call.table.memory("copy_", read, size, 1, dtype=dtype_name(on_device)), size)
    return [row, copy] if leaves else [copy, row]


def _copy_(call: Call) -> list[Kernel]:
    target, source = call.args[0], call.args[1]
    if on_host(target) != on_host(source):
        return _copied(call, source, target)
    return memory(call, bytes_of(source), bytes_of(target), 1, dtype_name(target))


def _to_copy(call: Call) -> list[Kernel]:
    source = call.args[0]
    if on_host(source) != on_host(call.out):
        return _copied(call, source, call.out)
    return by_bytes(call)


def _to_host(call: Call) -> list[Kernel]:
    """Returns a value that the host reads."""
    if on_host(call.args[0]):
        return []
    return [Kernel(call.table.host_copy(call.name, call.args[0].itemsize, dtype_name(call.args[0])), 0, True, True)]


def _equal(call: Call) -> list[Kernel]:
    """Compares all elements, reduces the flags to one, and the host reads that one (aten/native/cuda/Equal.cpp)."""
    one, other = call.args[0], call.args[1]
    flags = prod(shape_of(one))
    if shape_of(one) != shape_of(other) or not flags:
        return []
    compared = memory(call.named("eq"), bytes_of(one) + bytes_of(other), flags, 1, dtype_name(one), flags)
    reduced = memory(call.named("all"), flags, 1, 1, "bool")
    return [*compared, *reduced, Kernel(call.table.host_copy("_local_scalar_dense", 1, "bool"), 0, True, True)]


# -- gather and scatter ------------------------------------------------------------------------------------------


def _gather(call: Call) -> list[Kernel]:
    """Reads the rows that it takes and the indices. A mask becomes indices, whose number the host waits for; indices on
    the host are copied to the device."""
    made = first_tensor(call.out)
    size = 0 if made is None else prod(shape_of(made)) * made.itemsize
    indices = [value for argument in call.args[1:] for value in _tensors(argument)]
    device = call.args[0].device
    kernels = [kernel for index in indices for kernel in _index_kernels(call.table, index, device)]
    read = size + sum([bytes_of(index) for index in indices])
    return kernels + memory(call, read, all_bytes(call.out), call.plan.traits.launches, dtype_name(call.args[0]))


def _index_kernels(table: OpTableBuilder, index: torch.Tensor, device: torch.device) -> list[Kernel]:
    kernels: list[Kernel] = []
    if index.device != device and index.dim() > 0:
        kernels += [Kernel(table.host_copy("copy_", bytes_of(index), dtype_name(index)), 0, True, True)]
    if index.dtype in (torch.bool, torch.uint8):
        read = bytes_of(index)
        kernels += [Kernel(table.memory("nonzero", 2 * read, read, 3, dtype="bool"), sync=True)]
    return kernels


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list | tuple) else []


def _embedding(call: Call) -> list[Kernel]:
    return _gather(call.on((call.args[0], call.args[1]), call.out))


def _embedding_backward(call: Call) -> list[Kernel]:
    """Fills the table of gradients with zeros, then adds rows; many indices are sorted first (Embedding.cu).

    Sorted rows are summed by segments in fp32 and written once per distinct row.
    """
    gradient, indices = call.args[0], call.args[1]
    count = prod(shape_of(indices))
    moved, whole = bytes_of(gradient), bytes_of(call.out)
    touched = min(moved, whole)
    if count <= _EMBEDDING["unsorted_indices"]:
        read = moved + count * _INDEX + touched
        return memory(call, read, whole + touched, 2, dtype_name(gradient))
    passes = -(-max(1, as_int(call.args[2]).bit_length()) // _SORT["radix_bits"])
    sorted_bytes = count * 2 * _INDEX
    read = moved + passes * sorted_bytes + sorted_bytes
    launches = 1 + passes + _SORT["launches"] + _EMBEDDING["segment_launches"]
    partial = touched // gradient.itemsize * _FP32
    written = whole + touched + passes * sorted_bytes
    return memory(call, read + partial, written + partial, launches, dtype_name(gradient), 2 * sorted_bytes + partial)


def _scatter(call: Call) -> list[Kernel]:
    """Returns the kernels of scatter, index_add, index_copy and related operators: (self, dim, index, values); added
    rows are read too."""
    target, index = call.args[0], call.args[2]
    values = call.argument("src")
    values = call.argument("source") if values is None else values
    count = prod(shape_of(index))
    if call.name.startswith("index_"):
        sizes = shape_of(target)
        count = count * prod(sizes) // max(1, sizes[call.args[1]]) if sizes else 1
    hit = count * target.itemsize
    adds = "add" in call.name or "reduce" in call.name or call.argument("reduce") is not None
    read = bytes_of(index) + (hit if values is not None else 0) + (hit if adds else 0)
    return _onto(call, target, read, min(hit, bytes_of(target)) if not adds else hit, 1)


def _onto(call: Call, target: torch.Tensor, read: int, written: int, launches: int) -> list[Kernel]:
    """Writes into `target`, or into a copy of it where the op is not in place."""
    if not call.name.endswith("_"):
        whole = bytes_of(target)
        read, written, launches = read + whole, written + whole, launches + 1
    return memory(call, read, written, launches, dtype_name(target))


def _index_put(call: Call) -> list[Kernel]:
    """Returns the kernels of index_put. Accumulating puts sort their indices first (index_put_with_sort_kernel); masks
    with one value fill in place."""
    target, values, indices = call.args[0], call.argument("values"), _tensors(call.argument("indices"))
    adds = bool(call.argument("accumulate")) or "accumulate" in call.name
    if not adds and as_int(values.numel()) == 1 and all(index.dtype == torch.bool for index in indices):
        read = bytes_of(target) + sum([bytes_of(index) for index in indices])
        return _onto(call, target, read, bytes_of(target), 1)
    kernels = [kernel for index in indices for kernel in _index_kernels(call.table, index, target.device)]
    moved = prod(shape_of(values)) * target.itemsize
    read = moved + sum([bytes_of(index) for index in indices]) + all_bytes(call.argument("mask"))
    if not adds:
        return kernels + _onto(call, target, read, moved, 1)
    count = max([prod(shape_of(index)) for index in indices], default=0)
    passes = -(-max(1, prod(shape_of(target)).bit_length()) // _SORT["radix_bits"])
    sorting = count * 2 * _INDEX * passes
    return kernels + _onto(call, target, read + moved + sorting, moved + sorting, passes + _SORT["launches"] + 1)


def _fill_then_copy(call: Call) -> list[Kernel]:
    """Writes zeros everywhere, then the argument's elements in their place: backward passes of slices, padding."""
    moved = bytes_of(call.args[0])
    return memory(call, moved, bytes_of(call.out) + moved, 2, dtype_name(call.out))


def _copy_then_copy(call: Call) -> list[Kernel]:
    """Copies the first argument and replaces a part of it by the second: slice_scatter and related operators."""
    whole, part = bytes_of(call.args[0]), bytes_of(call.args[1])
    return memory(call, whole + part, bytes_of(call.out) + part, 2, dtype_name(call.out))


# -- softmax and losses ------------------------------------------------------------------------------------------


def _row_fits(tensor: torch.Tensor, dim: int) -> bool:
    sizes = shape_of(tensor)
    return not sizes or sizes[dim] * tensor.itemsize <= _CUDA["softmax"]["shared_bytes"]


def _softmax(call: Call) -> list[Kernel]:
    x = call.args[0]
    read = bytes_of(x) * (1 if _row_fits(x, call.args[1]) else 2)
    return memory(call, read, bytes_of(call.out), 1, dtype_name(x))


def _safe_softmax(call: Call) -> list[Kernel]:
    """Returns the kernels of softmax, then rows without a finite score set to zero: eq, all and where, and the two
    scalars that they need."""
    kernels = _softmax(call.named("_softmax"))
    size, flags = bytes_of(call.out), prod(shape_of(call.out))
    return kernels + memory(call, 2 * size + flags, flags + size, 5, dtype_name(call.out), flags + size)


def _logsumexp(call: Call) -> list[Kernel]:
    """Returns the kernels amax; abs, eq and masked_fill_ of it; sub, whose result exp_ changes in place; sum, log_ and
    add_."""
    size, sums = bytes_of(call.args[0]), bytes_of(call.out)
    return memory(call, 4 * size + 5 * sums, 2 * size + 6 * sums, 9, dtype_name(call.out), size + sums)


def _softmax_backward(call: Call) -> list[Kernel]:
    """Returns the kernels of the gradient. softmax first multiplies gradient and output in a kernel with a result of
    its own; log_softmax does not."""
    gradient, output, dim = call.args[0], call.args[1], call.args[2]
    size, other, made = bytes_of(gradient), bytes_of(output), bytes_of(call.out)
    again = 0 if _row_fits(gradient, dim) else size
    if call.name.startswith("_log"):
        return memory(call, size + other + again, made, 1, dtype_name(call.out))
    return memory(call, 2 * (size + other) + again, size + made, 2, dtype_name(call.out), workspace_bytes=size)


def _nll_loss(call: Call) -> list[Kernel]:
    """Reads the targets and one score for each."""
    scores, targets = call.args[0], call.args[1]
    read = bytes_of(targets) + prod(shape_of(targets)) * scores.itemsize
    return memory(call, read, all_bytes(call.out), 1, dtype_name(scores))


def _nll_loss_backward(call: Call) -> list[Kernel]:
    """Writes zeros everywhere, then one entry per target."""
    targets = call.args[2]
    count = prod(shape_of(targets))
    read = bytes_of(call.args[0]) + bytes_of(targets)
    return memory(call, read, bytes_of(call.out) + count * call.out.itemsize, 2, dtype_name(call.out))


# -- sorting -----------------------------------------------------------------------------------------------------


def _sort(call: Call) -> list[Kernel]:
    """Returns a radix sort of keys with their positions: every pass over 8 bits reads and writes both."""
    keys = call.args[0]
    both = prod(shape_of(keys)) * (keys.itemsize + _INDEX)
    passes = keys.itemsize * 8 // _SORT["radix_bits"]
    read, written = bytes_of(keys) + passes * both, (passes + 1) * both
    return memory(call, read, written, passes + _SORT["launches"], dtype_name(keys), 2 * both)


# -- lists of tensors --------------------------------------------------------------------------------------------


def multi_tensor_launches(sizes: list[int], lists: int, scalars: bool = False) -> int:
    """Returns the kernels that multi_tensor_apply launches for `lists` lists of tensors with these numbers of elements.

    A kernel takes a limited number of chunks of 65536 elements and of tensors; a tensor may continue in the next
    kernel.
    """
    limits: list[int] = _MULTI_TENSOR["tensors_with_scalars" if scalars else "tensors"]
    chunk_elements, most_blocks = _MULTI_TENSOR["chunk_elements"], _MULTI_TENSOR["blocks"]
    limit = limits[min(lists, len(limits)) - 1]
    launches = blocks = tensors = 0
    for size in sizes:
        chunks = -(-size // chunk_elements)
        if chunks == 0:
            continue
        tensors += 1
        while chunks:
            taken = min(chunks, most_blocks - blocks)
            chunks -= taken
            blocks += taken
            if blocks == most_blocks or (tensors == limit and not chunks):
                launches += 1
                blocks, tensors = 0, 1 if chunks else 0
    return launches + (blocks > 0)


def _lists(args: Arguments) -> list[Any]:
    """Returns the lists of tensors among the arguments."""
    return [value for value in args if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor)]


def _foreach(call: Call) -> list[Kernel]:
    """Returns multi-tensor kernels; lists of mixed dtypes take one kernel per tensor, unless they are copied."""
    lists = _lists(call.args)
    if not lists:
        return []
    read, written = traffic(call)
    reduces = call.name in ("_foreach_norm", "_foreach_max", "_foreach_powsum")
    depth = len(lists) + (1 if call.plan.writes_out and not reduces else 0)
    mixed = call.name != "_foreach_copy_" and any(len({t.dtype for t in tensors}) > 1 for tensors in lists)
    if mixed:
        launches = len(lists[0])
    else:
        scalars = any(isinstance(value, list | tuple) and value and isinstance(value[0], float) for value in call.args)
        launches = multi_tensor_launches([as_int(t.numel()) for t in lists[0]], depth, scalars) + reduces
    return memory(call, read, written, max(1, launches), dtype_name(lists[0]))


def _fused_optimizer(call: Call) -> list[Kernel]:
    """Reads and writes every list, except that gradients are written only where a loss scale is divided out, and step
    counters are only read."""
    lists = _lists(call.args)
    if not lists:
        return []
    read, written = traffic(call)
    if call.argument("grad_scale") is None:
        written -= all_bytes(call.args[1])
    state = lists[: -1 if call.argument("state_steps") else None]
    launches = multi_tensor_launches([as_int(t.numel()) for t in lists[0]], len(state))
    return memory(call, read, written, max(1, launches), dtype_name(lists[0]))


def _cat(call: Call) -> list[Kernel]:
    read, written = traffic(call)
    return memory(call, read, written, -(-len(call.args[0]) // _CUDA["cat"]["tensors"]), dtype_name(call.out))


def _gather_copy_in(call: Call) -> list[Kernel]:
    """Returns FSDP2's copy of its shards into the buffer of an all-gather: a multi-tensor copy."""
    shards, buffer = call.args[0], call.args[1]
    sizes = [as_int(shard.numel()) for shard in shards]
    launches = max(1, multi_tensor_launches(sizes, 2))
    return memory(call, all_bytes(shards), sum(sizes) * buffer.itemsize, launches, dtype_name(buffer))


def _triton(call: Call) -> list[Kernel]:
    """Returns a Triton kernel of the user's: every tensor that it is given moves once."""
    given = list(call.kwargs.get("kwargs", {}).values())
    return memory(call, all_bytes(given), 0, 1, dtype_name(given))


_EMBEDDING_BAG = ("_embedding_bag", "_embedding_bag_forward_only")
_FILLED = ("slice_backward", "select_backward", "diagonal_backward", "unfold_backward", "constant_pad_nd")
_SCATTERS = ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce", "index_fill")
_PUTS = ("index_put", "_index_put_impl", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate")


@cache
def _foreach_names() -> tuple[str, ...]:
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return tuple(name for name in names if name.startswith(("_foreach_", "_amp_foreach_")) and name != "_foreach_mm")


MEMORY_RULES: dict[str, Any] = {
    **dict.fromkeys(("copy_", "copy", "_copy_from", "fsdp::copy_"), _copy_),
    "_to_copy": _to_copy,
    **dict.fromkeys(("_local_scalar_dense", "item", "is_nonzero"), _to_host),
    "equal": _equal,
    **dict.fromkeys(("index", "_unsafe_index", "index_select", "gather", "take"), _gather),
    **dict.fromkeys(("embedding", *_EMBEDDING_BAG), _embedding),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys([name + end for name in _SCATTERS for end in ("", "_")], _scatter),
    **dict.fromkeys([name + end for name in _PUTS for end in ("", "_")], _index_put),
    **dict.fromkeys(_FILLED, _fill_then_copy),
    **dict.fromkeys(("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"), _copy_then_copy),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    "_safe_softmax": _safe_softmax,
    "logsumexp": _logsumexp,
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll_loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_loss_backward),
    **dict.fromkeys(("sort", "argsort", "msort"), _sort),
    **dict.fromkeys(_foreach_names(), _foreach),
    **dict.fromkeys([f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")], _fused_optimizer),
    **dict.fromkeys(("cat", "stack", "_stack", "concat"), _cat),
    "fsdp::all_gather_copy_in": _gather_copy_in,
    **dict.fromkeys([f"higher_order::triton_kernel_wrapper_{kind}" for kind in ("mutation", "functional")], _triton),
}
