"""Reads facts for the op rules from tensors and operator schemas: bytes, names of dtypes, and which arguments an
operator reads and writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.core.program.builder import OpTableBuilder

READ, WRITE = 1, 2
"""Bits of an argument's use."""
UNKNOWN = 0
"""The size of a dim that fake tensors leave open and that has no hint."""

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2fnuz: "fp8",
    torch.float8_e8m0fnu: "fp8",
    torch.float4_e2m1fn_x2: "nvfp4",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}

_LISTS = (list, tuple)
_MOVED = (torch.Tensor, list, tuple)

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel (or copy) that an op launches on the device."""

    op: int
    """The row of the op table."""
    workspace_bytes: int = 0
    """The memory that the op allocates and frees itself."""
    host_copy: bool = False
    """Whether it copies between host and device memory."""
    sync: bool = False
    """Whether the host waits for its end."""
    guessed: bool = False
    """Whether no rule knows the op, so that it costs the bytes of its tensors."""


def as_int(size: Any) -> int:
    """Returns a size as a number: itself, a symbol's hint, or UNKNOWN for a symbol without one."""
    if type(size) is int:
        return size
    node = getattr(size, "node", None)
    if node is None:
        return int(size)
    return int(node.hint) if node.has_hint() else UNKNOWN


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the sizes as numbers."""
    return tuple([as_int(size) for size in tensor.shape])


def elements(tensor: torch.Tensor) -> int:
    """Returns the distinct elements of memory behind `tensor`: dims of stride 0 and overlapping windows count once."""
    count = tensor.numel()
    if type(count) is not int:
        return as_int(count)
    if count <= 1 or tensor.layout is not torch.strided or tensor.is_contiguous():
        return count
    span = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0:
            count //= size
        else:
            span += (size - 1) * stride
    return min(count, span)


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of memory behind `tensor`; 0 for a 0-dim tensor of the host, which is an argument of the
    kernel."""
    count = elements(tensor)
    if count == 1 and tensor.dim() == 0 and tensor.device.type == "cpu":
        return 0
    return count * tensor.itemsize


def all_bytes(value: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in a list or tuple; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return bytes_of(value)
    total = 0
    if isinstance(value, _LISTS):
        for item in value:
            if isinstance(item, torch.Tensor):
                total += bytes_of(item)
            elif isinstance(item, _LISTS):
                total += all_bytes(item)
    return total


def first_tensor(*values: Any) -> torch.Tensor | None:
    """Returns the first tensor in `values`, looking into lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, _LISTS):
            found = first_tensor(*value)
            if found is not None:
                return found
    return None


def dtype_name(*values: Any) -> str:
    """Returns the short name of the dtype of the first tensor in `values`; "" without one."""
    tensor = first_tensor(*values)
    return "" if tensor is None else DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def on_host(tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` is in host memory."""
    return bool(tensor.device.type == "cpu")


@dataclass(frozen=True, slots=True)
class Traits:
    """Lists how an operator differs from "reads every input once, writes every output once, in one kernel"."""

    launches: int = 1
    unread: tuple[int, ...] = ()
    """The positions of arguments whose data is not read."""
    twice: tuple[int, ...] = ()
    """The positions of arguments that are read in two passes."""
    sync: bool = False
    """Whether the host waits to learn the size of the result."""
    kernel: str = ""
    """The kind of the kernels in core/cost/kernels.yaml, which determines their share of HBM's bandwidth."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes how an operator uses its arguments according to its schema. It is made once per operator."""

    name: str
    """The name without namespace and overload."""
    position: Mapping[str, int]
    defaults: Mapping[str, Any]
    use: Sequence[int]
    """READ and WRITE bits of each positional argument."""
    keyword_use: Mapping[str, int]
    writes_out: bool
    """Whether it returns new tensors."""
    traits: Traits
    guessed: bool


def plan_of(name: str, schema: Any, traits: Traits, guessed: bool) -> Plan:
    """Returns the plan of an operator with this schema (None: a higher-order operator, all of whose tensors are
    read)."""
    if schema is None:
        return Plan(name, {}, {}, (), {}, True, traits, guessed)
    position: dict[str, int] = {}
    defaults: dict[str, Any] = {}
    use: list[int] = []
    keyword_use: dict[str, int] = {}
    for index, argument in enumerate(schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        bits = 0 if index in traits.unread or (written and argument.is_out) else READ
        bits |= WRITE if written else 0
        if argument.has_default_value():
            defaults[argument.name] = argument.default_value
        keyword_use[argument.name] = bits
        if not argument.kwarg_only:
            position[argument.name] = index
            use.append(bits)
    fresh = any(returned.alias_info is None for returned in schema.returns)
    return Plan(name, position, defaults, use, keyword_use, fresh, traits, guessed)


@dataclass(slots=True)
class Call:
    """One call of an operator, as a rule of its kernels sees it."""

    table: OpTableBuilder
    """Where the rows of its kernels go."""
    plan: Plan
    args: Arguments
    kwargs: Keywords
    out: Any
    """What it returned."""

    @property
    def name(self) -> str:
        """Returns the operator's name, which its rows have."""
        return self.plan.name

    def argument(self, name: str) -> Any:
        """Returns the argument `name`, or its default; None for a name that the schema lacks."""
        index = self.plan.position.get(name)
        if index is not None and index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, self.plan.defaults.get(name))

    def named(self, name: str) -> Call:
        """Returns the call with another name for its rows."""
        return replace(self, plan=replace(self.plan, name=name))

    def on(self, args: Arguments, out: Any) -> Call:
        """Returns a call of the same operator on `args` alone, which returned `out`."""
        return Call(self.table, self.plan, args, {}, out)


def traffic(call: Call) -> tuple[int, int]:
    """Returns the bytes read and written by a call: every tensor once, by its use."""
    read = written = 0
    plan, args, use = call.plan, call.args, call.plan.use
    known = len(use)
    for index, value in enumerate(args):
        if isinstance(value, _MOVED):
            size = all_bytes(value)
            bits = use[index] if index < known else READ
            if bits & READ:
                read += size
            if bits & WRITE:
                written += size
    for name, value in call.kwargs.items():
        if isinstance(value, _MOVED):
            size = all_bytes(value)
            bits = plan.keyword_use.get(name, READ)
            if bits & READ:
                read += size
            if bits & WRITE:
                written += size
    for index in plan.traits.twice:
        if index < len(args):
            read += all_bytes(args[index])
    if plan.writes_out:
        written += all_bytes(call.out)
    return read, written


def memory(
    call: Call,
    read: float,
    written: float,
    launches: int,
    dtype: str,
    workspace_bytes: int = 0,
    flops: float = 0.0,
) -> list[Kernel]:
    """Returns one memory-bound row named after the operator; nothing if no byte moves."""
    if read + written <= 0:
        return []
    plan = call.plan
    row = call.table.memory(plan.name, read, written, launches, flops, dtype, plan.traits.kernel)
    return [Kernel(row, workspace_bytes, sync=plan.traits.sync, guessed=plan.guessed)]


def by_bytes(call: Call) -> list[Kernel]:
    """Returns the default rule: reads every input once and writes every output once."""
    read, written = traffic(call)
    return memory(call, read, written, call.plan.traits.launches, dtype_name(call.out, call.args))
