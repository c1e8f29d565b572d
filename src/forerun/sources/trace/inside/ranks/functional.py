"""Functional collectives: those that DTensor and compiled code call as operators.

c10d's own collectives never arrive as operators, because VirtualGroup overrides every method that would call them. A
functional collective runs on its group's stream, and `wait_tensor` makes the current stream wait for it. The variants
with a gradient (`_c10d_functional_autograd`) call the same operators.

A fused product of asynchronous tensor parallelism (`symm_mem`) is recorded as a collective on the group's stream beside
its product: both start together, and later kernels wait for both.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from forerun.core.program.types import Collective
from forerun.sources.trace.inside.kernels.rules import describe
from forerun.sources.trace.inside.kernels.tensors import dtype_name
from forerun.sources.trace.inside.ranks.transport import Transport
from forerun.sources.trace.inside.recorder import Event, Recorder

_pending: dict[int, tuple[Event, Any]] = {}
"""The end of the collective that made a storage, and a weak reference that removes the entry with the storage."""
_OPS = {name.upper(): getattr(dist.ReduceOp, name.upper()) for name in ("sum", "avg", "product", "min", "max")}


def handle(func: Any, args: Any, kwargs: Any, recorder: Recorder) -> tuple[bool, Any]:
    """Returns whether `func` is a collective, and its result on fake tensors if so; the collective is recorded."""
    if func.namespace not in _NAMESPACES:
        return False, None
    name = func._schema.name if hasattr(func, "_schema") else ""
    fused = _FUSED.get(name)
    if fused is not None and isinstance(args[0], FakeTensor):
        return True, _beside(func, args, kwargs, recorder, *fused)
    rule = _RULES.get(name)
    if rule is None:
        return False, None
    return True, rule(*args, **kwargs)


_NAMESPACES = ("_c10d_functional", "_dtensor", "symm_mem")
_GATHER, _SCATTER = ("all_gather", Collective.ALL_GATHER), ("reduce_scatter", Collective.REDUCE_SCATTER)
_FUSED = {
    "symm_mem::fused_all_gather_matmul": _GATHER,
    "symm_mem::fused_all_gather_scaled_matmul": _GATHER,
    "symm_mem::fused_matmul_reduce_scatter": _SCATTER,
    "symm_mem::fused_scaled_matmul_reduce_scatter": _SCATTER,
}
"""The collective that each product of asynchronous tensor parallelism contains."""


def _beside(func: Any, args: Any, kwargs: Any, recorder: Recorder, name: str, kind: Collective) -> Any:
    """Runs a fused product on fake tensors. Its collective moves the gathered input, or the product before it is
    scattered."""
    mode = args[0].fake_mode
    recorder.paused += 1
    try:
        with mode:
            out = func(*args, **kwargs)
    finally:
        recorder.paused -= 1
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    group = group_of(given["group_name"])
    moved = args[0] if kind == Collective.ALL_GATHER else out
    nbytes = moved.numel() * moved.element_size() * group.size_
    event = group.record(name, kind, nbytes, dtype_name(moved), True)
    for kernel in describe(recorder.ops, func, args, kwargs, out):
        recorder.node(kernel.op, sync=kernel.sync)
    recorder.wait_event(event)
    return out


def group_of(name: Any) -> Any:
    """Returns the group that an operator names: by its registered name, as an object, or boxed for TorchScript."""
    if isinstance(name, dist.ProcessGroup):
        return name
    module: Any = c10d
    return module._resolve_process_group(name) if isinstance(name, str) else module.ProcessGroup.unbox(name)


def _new(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    mode = like.fake_mode if isinstance(like, FakeTensor) else contextlib.nullcontext()
    with mode, torch.no_grad():
        return torch.empty(list(shape), dtype=like.dtype, device=like.device)


def _like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_new(t, t.shape) for t in tensors]


def _made(work: Any, outputs: Sequence[torch.Tensor]) -> None:
    if work.event is None:
        return
    for tensor in outputs:
        storage = tensor.untyped_storage()
        key = storage._cdata
        _pending[key] = work.event, weakref.ref(storage, functools.partial(_forget, key))


def _forget(key: int, _storage: Any) -> None:
    _pending.pop(key, None)


def _wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    found = _pending.pop(tensor.untyped_storage()._cdata, None)
    if found is not None:
        Transport.recorder.wait_event(found[0])
    return tensor


def _reduce_op(name: str) -> Any:
    return _OPS.get(name.upper(), dist.ReduceOp.SUM)


def _all_reduce_into(outputs: list[torch.Tensor], inputs: Sequence[torch.Tensor], op: str, name: Any) -> Any:
    group = group_of(name)
    _made(group.collect(Collective.ALL_REDUCE, inputs, outputs, group.reduction(_reduce_op(op))), outputs)
    return outputs


def _all_reduce(tensor: torch.Tensor, op: str, name: Any) -> torch.Tensor:
    return _all_reduce_into(_like([tensor]), [tensor], op, name)[0]


def _all_reduce_(tensor: torch.Tensor, op: str, name: Any) -> torch.Tensor:
    return _all_reduce_into([tensor], [tensor], op, name)[0]


def _all_reduce_coalesced(tensors: Sequence[torch.Tensor], op: str, name: Any) -> Any:
    return _all_reduce_into(_like(tensors), tensors, op, name)


def _all_reduce_coalesced_(tensors: Sequence[torch.Tensor], op: str, name: Any) -> Any:
    return _all_reduce_into(list(tensors), tensors, op, name)


def _all_gather_coalesced(tensors: Sequence[torch.Tensor], size: int, name: Any, out: Any = None) -> Any:
    outputs = out or [_new(t, (size * (t.shape[0] if t.dim() else 1), *t.shape[1:])) for t in tensors]
    _made(group_of(name).allgather_into_tensor_coalesced(outputs, tensors), outputs)
    return outputs


def _all_gather(tensor: torch.Tensor, size: int, name: Any, *, out: Any = None) -> Any:
    return _all_gather_coalesced([tensor], size, name, None if out is None else [out])[0]


def _reduce_scatter_coalesced(tensors: Sequence[torch.Tensor], op: str, size: int, name: Any, out: Any = None) -> Any:
    group = group_of(name)
    outputs = out or [_new(t, (t.shape[0] // size, *t.shape[1:])) for t in tensors]
    answer = group.reduction_of_own_chunk(_reduce_op(op))
    _made(group.collect(Collective.REDUCE_SCATTER, tensors, outputs, answer), outputs)
    return outputs


def _reduce_scatter(tensor: torch.Tensor, op: str, size: int, name: Any, *, out: Any = None) -> Any:
    return _reduce_scatter_coalesced([tensor], op, size, name, None if out is None else [out])[0]


def _all_to_all(tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], name: Any) -> Any:
    rows = sum(output_splits) if output_splits else tensor.shape[0]
    output = _new(tensor, (rows, *tensor.shape[1:]))
    _made(group_of(name).alltoall_base(output, tensor, output_splits, input_splits), [output])
    return output


def _broadcast_into(output: torch.Tensor, tensor: torch.Tensor, name: Any) -> torch.Tensor:
    group = group_of(name)
    _made(group.collect(Collective.BROADCAST, [tensor], [output], lambda values: values), [output])
    return output


def _shard_dim_alltoall(tensor: torch.Tensor, gather_dim: int, shard_dim: int, name: Any) -> torch.Tensor:
    group = group_of(name)
    shape = list(tensor.shape)
    shape[gather_dim] *= group.size_
    shape[shard_dim] //= group.size_
    output = _new(tensor, shape)

    def answer(values: list[torch.Tensor]) -> list[torch.Tensor]:
        mine = values[0].chunk(group.size_, shard_dim)[group.rank_]
        return [torch.cat([mine] * group.size_, gather_dim)]

    event = group.collect(Collective.ALL_TO_ALL, [tensor], [output], answer).event
    Transport.recorder.wait_event(event)
    return output


def _isend(tensor: torch.Tensor, peer: int, tag: int, name: Any) -> torch.Tensor:
    group = group_of(name)
    output = _new(tensor, (0,))
    _made(group.send([tensor], group.ranks.index(peer), tag), [output])
    return output


def _irecv(tensor: torch.Tensor, peer: int, tag: int, name: Any) -> torch.Tensor:
    group = group_of(name)
    _made(group.recv([tensor], group.ranks.index(peer), tag), [tensor])
    return tensor


def _batch(kinds: Any, peers: Any, tags: Any, tensors: Any, name: Any) -> list[torch.Tensor]:
    group = group_of(name)
    group._start_coalescing()
    outputs = []
    for kind, peer, tag, tensor in zip(kinds, peers, tags, tensors, strict=True):
        (group.send if kind == "isend" else group.recv)([tensor], group.ranks.index(peer), tag)
        outputs.append(_new(tensor, (0,)) if kind == "isend" else tensor)
    _made(group._end_coalescing(), outputs)
    return outputs


_RULES: dict[str, Callable[..., Any]] = {
    "_c10d_functional::all_reduce": _all_reduce,
    "_c10d_functional::all_reduce_": _all_reduce_,
    "_c10d_functional::all_reduce_coalesced": _all_reduce_coalesced,
    "_c10d_functional::all_reduce_coalesced_": _all_reduce_coalesced_,
    "_c10d_functional::all_gather_into_tensor": _all_gather,
    "_c10d_functional::all_gather_into_tensor_out": _all_gather,
    "_c10d_functional::all_gather_into_tensor_coalesced": _all_gather_coalesced,
    "_c10d_functional::reduce_scatter_tensor": _reduce_scatter,
    "_c10d_functional::reduce_scatter_tensor_out": _reduce_scatter,
    "_c10d_functional::reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
    "_c10d_functional::all_to_all_single": _all_to_all,
    "_c10d_functional::broadcast": lambda tensor, src, name: _broadcast_into(_new(tensor, tensor.shape), tensor, name),
    "_c10d_functional::broadcast_": lambda tensor, src, name: _broadcast_into(tensor, tensor, name),
    "_c10d_functional::isend": _isend,
    "_c10d_functional::irecv": _irecv,
    "_c10d_functional::batch_p2p_ops": _batch,
    "_c10d_functional::wait_tensor": _wait_tensor,
    "_c10d_functional::_wrap_tensor_autograd": AsyncCollectiveTensor,
    "_dtensor::shard_dim_alltoall": _shard_dim_alltoall,
}
